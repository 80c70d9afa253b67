/*
 * Sends a few flows under the scheduler, and says who decided.
 *
 *   cc -std=c99 -Iinclude examples/send.c -llaxity_client -o send
 *   LAXITY_SOCKET=/run/laxity/laxityd.sock ./send
 *
 * "Sending" is adding up bytes here; where it says so, a real program posts a work request or
 * writes to a socket marked with grant.dscp.
 */
#include "laxity.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#define FLOWS 16

static int failed(const char *what)
{
    fprintf(stderr, "send: %s\n", what);
    return 1;
}

/* One after the other, sleeping until each grant. */
static int send_and_wait(lax_lane *lane, uint8_t stage, uint64_t bytes, uint64_t *sent)
{
    lax_flow flow = LAX_FLOW_INIT;
    lax_ticket ticket;
    lax_grant grant;

    flow.stage = stage;
    flow.bytes = bytes;
    flow.batch = 1;
    flow.request = 7;
    flow.layer = 3;
    if (lax_submit(lane, &flow, &ticket) != 0)
        return failed("submit");
    do {
        if (lax_wait(lane, &ticket, &grant) != 1)
            return failed("wait");
        *sent += grant.bytes; /* here: post grant.bytes with grant.dscp */
        lax_complete(lane, &ticket, grant.bytes);
    } while (!grant.last);
    return lax_wait(lane, &ticket, &grant) == 0 && grant.last ? 0 : failed("wait after the last");
}

/* Many at once, as an event loop does it. */
static int send_many(lax_lane *lane, uint64_t bytes, uint64_t *sent)
{
    lax_ticket tickets[FLOWS];
    int done[FLOWS] = {0};
    int i, left = FLOWS;

    for (i = 0; i < FLOWS; i++) {
        lax_flow flow = LAX_FLOW_INIT;
        flow.stage = LAX_STAGE_P2D;
        flow.bytes = bytes;
        if (lax_submit(lane, &flow, &tickets[i]) != 0)
            return failed("submit");
    }
    while (left > 0) {
        lax_wait_any(lane, 1000000000);
        for (i = 0; i < FLOWS; i++) {
            lax_grant grant;
            if (done[i] || lax_poll(lane, &tickets[i], &grant) != 1)
                continue;
            *sent += grant.bytes;
            lax_complete(lane, &tickets[i], grant.bytes);
            if (grant.last) {
                done[i] = 1;
                left--;
            }
        }
    }
    return 0;
}

/* Without lane or client everything is granted, so nothing needs to be checked. */
static int send_without_anything(uint64_t *sent)
{
    lax_flow flow = LAX_FLOW_INIT;
    lax_ticket ticket;
    lax_grant grant;

    flow.bytes = 5;
    if (lax_submit(NULL, &flow, &ticket) != -EINVAL)
        return failed("submit to no lane");
    if (lax_wait(NULL, &ticket, &grant) != 1 || !grant.last || !grant.bypassed)
        return failed("wait on no lane");
    *sent += grant.bytes;
    flow.stage = 99;
    if (lax_submit(NULL, NULL, &ticket) != -EINVAL || lax_submit(NULL, &flow, NULL) != -EINVAL ||
        lax_poll(NULL, NULL, NULL) != -EINVAL || lax_complete(NULL, NULL, 0) != -EINVAL ||
        lax_cancel(NULL, NULL) != -EINVAL || lax_get_stats(NULL, NULL) != -EINVAL ||
        lax_hint_batch_end(NULL, 1) != -EINVAL || lax_lane_open(NULL) != NULL)
        return failed("null arguments");
    lax_lane_close(NULL);
    lax_detach(NULL);
    return 0;
}

static void print_layout(void)
{
    printf("sizes %zu %zu %zu %zu %zu\n", sizeof(lax_options), sizeof(lax_flow), sizeof(lax_ticket),
           sizeof(lax_grant), sizeof(lax_stats));
    printf("offsets %zu %zu %zu %zu %zu\n", offsetof(lax_options, attach_timeout_ms),
           offsetof(lax_flow, unused), offsetof(lax_flow, deadline_ns),
           offsetof(lax_grant, bypassed), offsetof(lax_stats, lane_full));
}

int main(void)
{
    lax_client *client;
    lax_lane *lane;
    lax_ticket ticket;
    lax_flow flow = LAX_FLOW_INIT;
    lax_stats stats = LAX_STATS_INIT;
    uint64_t sent = 0;

    if (lax_abi_version() != LAX_ABI_VERSION)
        return failed("library and header disagree");
    print_layout();
    client = lax_attach(NULL);
    lane = lax_lane_open(client);
    if (client == NULL || lane == NULL)
        return failed("attach");

    lax_hint_batch_begin(lane, 1, 32, 2000000);
    lax_hint_request_join(lane, 1, 7, 0, 1 << 20);
    lax_hint_layer_begin(lane, 1, 3);
    if (send_and_wait(lane, LAX_STAGE_KV_REUSE, 100000, &sent) ||
        send_and_wait(lane, LAX_STAGE_COLLECTIVE, 1000, &sent) || send_many(lane, 2500, &sent) ||
        send_without_anything(&sent))
        return 1;
    flow.bytes = 77;
    if (lax_submit(lane, &flow, &ticket) != 0 || lax_cancel(lane, &ticket) != 0)
        return failed("cancel");
    lax_hint_compute_end(lane, 1);
    lax_hint_request_end(lane, 7);
    lax_hint_batch_end(lane, 1);

    if (lax_get_stats(client, &stats) != 0)
        return failed("stats");
    lax_lane_close(lane);
    lax_detach(client);
    printf("sent %" PRIu64 " scheduled %" PRIu64 " bypassed %" PRIu64 "\n", sent,
           stats.scheduled_bytes, stats.bypassed_bytes);
    return 0;
}
