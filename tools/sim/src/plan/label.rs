//! Labels of fields on axes, with their units.

/// Returns the label of an axis over `field`, or the field's name if it has no label.
pub(super) fn of(field: &str) -> &str {
    match field {
        "workload.rate_per_gpu" => "request rate, 1/s per prefill GPU",
        "workload.burstiness" => "burstiness, coefficient of variation",
        "workload.length_scale" => "prompt lengths, × recorded",
        "cluster.nic_gbps" => "NIC rate, Gb/s",
        "cluster.servers" => "servers",
        "cluster.oversubscription" => "oversubscription",
        "model.name" => "model",
        "model.expert_skew" => "expert skew, Zipf exponent",
        "serving.lookahead_layers" => "lookahead, layers",
        "serving.token_budget" => "tokens per batch and rank",
        "serving.decode_tp" => "GPUs per decode rank",
        "serving.cache_tokens" => "prefix cache per unit, tokens",
        "serving.routing" => "routing",
        "slo.factor" => "objective, × TTFT alone",
        "network.levels_on_wire" => "classes in the fabric",
        "network.chunk_bytes" => "chunk, bytes",
        "network.window_bytes" => "window, bytes",
        "policy.levels" => "levels",
        "policy.granularity" => "granularity",
        other => other,
    }
}
