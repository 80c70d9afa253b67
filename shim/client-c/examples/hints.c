/* Gives the hints of an inference engine, also invalid ones, and prints the answers. Needs no daemon. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>

#include "laxity.h"

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static const char *name_of(int status) {
    switch (status) {
    case 0: return "0";
    case -EINVAL: return "EINVAL";
    case -ETIME: return "ETIME";
    case -EALREADY: return "EALREADY";
    case -ERANGE: return "ERANGE";
    default: return "?";
    }
}

int main(void) {
    lax_request facts = LAX_REQUEST_INIT;
    lax_request late = LAX_REQUEST_INIT;
    lax_hint_stats stats = LAX_HINT_STATS_INIT;
    const uint64_t request = lax_number("a");
    int taken[8], refused[6], i;

    printf("sizes %zu %zu\n", sizeof(lax_request), sizeof(lax_hint_stats));
    printf("offsets %zu %zu\n", offsetof(lax_request, tenant),
           offsetof(lax_hint_stats, deadlines_passed));
    printf("number %llu\n", (unsigned long long)request);

    facts.deadline_ns = now_ns() + 400000000u; /* a time to first token of 400 ms */
    facts.bytes = 4096;
    facts.tenant = "somebody";
    taken[0] = lax_request_begin(request, &facts);
    taken[1] = lax_batch_begin(1, 32, 2000000);
    taken[2] = lax_batch_join(1, request);
    /* The header traceparent of the request's HTTP call. One that is invalid is ignored. */
    taken[2] |= lax_request_trace(request, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    taken[2] |= lax_request_trace(request, "invalid") | lax_request_trace(request, NULL);
    taken[3] = lax_batch_queued(1, 9);
    taken[4] = lax_layer_begin(1, 3);

    late.deadline_ns = 1;
    refused[0] = lax_request_begin(5, &late);
    refused[2] = lax_layer_begin(1, 32);
    refused[3] = lax_batch_begin(2, 0, 0);
    refused[4] = lax_request_begin(0, NULL);
    refused[5] = lax_request_begin(6, NULL) ? 1 : lax_batch_join(0, 6);

    taken[5] = lax_compute_end(1);
    taken[6] = lax_request_end(request);
    refused[1] = lax_request_end(request);
    taken[7] = lax_batch_end(1);

    printf("taken");
    for (i = 0; i < 8; i++) printf(" %s", name_of(taken[i]));
    printf("\nrefused");
    for (i = 0; i < 6; i++) printf(" %s", name_of(refused[i]));
    lax_get_hint_stats(&stats);
    printf("\ncounted hints %d requests %d batches %d ended twice %d layers unknown %d deadlines passed %d\n",
           (int)stats.hints, (int)stats.requests, (int)stats.batches,
           (int)stats.requests_ended_twice, (int)stats.layers_unknown, (int)stats.deadlines_passed);
    return 0;
}
