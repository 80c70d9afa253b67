//! The endpoint, of one process.

use crate::running::{Running, alone, eventually, model, prompt, with_model};

#[test]
fn an_answer_is_the_same_whole_and_streamed_and_counts_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Running::start(folder.path(), "whole", &model(false));
    let body = r#"{"model":"tiny","prompt":"Hello, world","max_tokens":20,"ignore_eos":true"#;
    let whole = engine.post("/v1/completions", "x-slo-ttft-ms: 500\r\n", &format!("{body}}}"));
    assert_eq!(whole.status, 200, "{}", whole.body);
    let whole = whole.json();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["prompt_tokens"], 13, "twelve bytes and a mark");
    let streamed = engine.post(
        "/v1/completions",
        "",
        &format!("{body},\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}"),
    );
    let events = streamed.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<serde_json::Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 20);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");

    // Tokens as numbers, where they are asked for: text may show two of them alike.
    let ids = |event: &serde_json::Value| -> Vec<u64> {
        let ids = event["choices"][0]["token_ids"].as_array();
        ids.into_iter().flatten().filter_map(serde_json::Value::as_u64).collect()
    };
    assert!(ids(&whole).is_empty() && chunks.iter().all(|chunk| ids(chunk).is_empty()));
    let asked = format!("{body},\"return_token_ids\":true");
    let numbered = engine.post("/v1/completions", "", &format!("{asked}}}"));
    let numbered = ids(&numbered.json());
    assert_eq!(numbered.len(), 20);
    let streamed = engine.post("/v1/completions", "", &format!("{asked},\"stream\":true}}"));
    let events = streamed.events();
    let events = events[..events.len() - 1].iter();
    let one_by_one: Vec<u64> =
        events.flat_map(|event| ids(&serde_json::from_str(event).unwrap())).collect();
    assert_eq!(one_by_one, numbered);

    assert_eq!(engine.get("/v1/models").0, 200);
    assert!(engine.get("/v1/models").1.contains("\"tiny\""));
    assert!(engine.metric("laxity_engine_requests_total") >= 4.0);
    let ended = engine.terminate();
    assert!(ended, "SIGTERM ends it in order");
}

#[test]
fn what_cannot_be_answered_is_refused_with_a_reason() {
    const OBJECTIVE: &str = "impossible_objective";
    let folder = tempfile::tempdir().unwrap();
    let limits = "limits = { output_max = 900, body_bytes_max = 20000 }";
    let config = with_model(false, &format!("kv = {{ blocks = 8, block_tokens = 16 }}\n{limits}"));
    let engine = Running::start(folder.path(), "whole", &config);
    let x = "{\"prompt\":\"x\"}";
    let long = format!("{{\"prompt\":\"{}\"}}", "x".repeat(1100));
    let large = format!("{{\"prompt\":\"{}\"}}", "x".repeat(30_000));
    let cases = [
        ("{\"prompt\":", "", "invalid_json", "EOF"),
        ("{}", "", "missing_field", "`prompt`"),
        ("{\"prompt\":\"x\",\"model\":\"gpt\"}", "", "model_not_found", "`gpt`"),
        (&long, "", "context_length_exceeded", "context of 1024"),
        ("{\"prompt\":\"x\",\"max_tokens\":200}", "", "context_length_exceeded", "KV cache"),
        ("{\"prompt\":\"x\",\"max_tokens\":901}", "", "too_many_tokens", "limits.output_max"),
        ("{\"prompt\":\"x\",\"max_tokens\":0}", "", "invalid_value", "at least 1"),
        ("{\"prompt\":[]}", "", "empty_prompt", "no token"),
        ("{\"prompt\":[999]}", "", "invalid_value", "token 999"),
        ("{\"prompt\":\"x\",\"n\":2}", "", "unsupported_value", "`n`"),
        ("{\"prompt\":\"x\",\"stop\":[\"a\"]}", "", "unsupported_value", "`stop`"),
        ("{\"prompt\":\"x\",\"temperature\":1}", "", "unsupported_value", "temperature"),
        (x, "slo-ttft-ms: 5\r\nx-llm-d-slo-ttft-ms: 0", OBJECTIVE, "x-llm-d-slo-ttft-ms is `0`"),
        (x, "slo-ttft-ms: -3", OBJECTIVE, "above 0"),
        (x, "slo-ttft-ms: NaN", OBJECTIVE, "`NaN`"),
        (x, "slo-tpot-ms: soon", OBJECTIVE, "`soon`"),
        (x, "slo-ttlt-ms: 0", OBJECTIVE, "x-slo-ttlt-ms is `0`"),
        (x, "slo-ttlt-ms: 500\r\nx-slo-tpot-ms: 5", OBJECTIVE, "exclude each other"),
        (x, "laxity-importance: gold", "invalid_value", "`paid` (the default) or `free`"),
        (x, "laxity-prefill: 3", "invalid_value", "one of the 0 of peers.prefill"),
        (&large, "", "body_too_long", "20000 bytes"),
    ];
    for (body, header, code, message) in cases {
        let status = match code {
            "model_not_found" => 404,
            "body_too_long" => 413,
            _ => 400,
        };
        let headers = if header.is_empty() { String::new() } else { format!("x-{header}\r\n") };
        let answer = engine.post("/v1/completions", &headers, body);
        let shown = &body[..body.len().min(60)];
        assert_eq!(answer.status, status, "{shown} {headers}: {}", answer.body);
        let (said, why) = answer.error();
        assert_eq!(said, code, "{shown} {headers}");
        assert!(why.contains(message), "{shown} {headers}: {why}");
    }
    // The answer arrives although the body has more bytes than the sockets' buffers hold.
    for (headers, code) in [("", "body_too_long"), ("x-slo-ttft-ms: 0\r\n", "body_too_long")] {
        let huge = format!("{{\"prompt\":\"{}\"}}", "x".repeat(20 << 20));
        let answer = engine.post("/v1/completions", headers, &huge);
        assert_eq!((answer.status, answer.error().0.as_str()), (413, code));
    }
    assert_eq!(engine.get("/v2").0, 404);
    assert_eq!(engine.get("/v1/completions").0, 405);
    // None of these requests holds anything any more.
    assert!(engine.is_idle(), "{}", engine.health());
    engine.complete(&prompt(1, 20), 5);
}

#[test]
fn whoever_goes_away_frees_its_blocks_and_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_model(false, "limits = { requests_max = 2 }");
    let engine = Running::start(folder.path(), "whole", &config);
    for stream in [true, false] {
        let body = format!(
            r#"{{"prompt":"{}","max_tokens":900,"ignore_eos":true,"stream":{stream}}}"#,
            "y".repeat(100)
        );
        let both = [(); 2].map(|()| engine.begin("/v1/completions", "", &body));
        eventually("both are being served", || engine.health()["requests"] == 2);
        let third = engine.post("/v1/completions", "", &body);
        if third.status != 200 {
            assert_eq!((third.status, third.error().0.as_str()), (429, "too_many_requests"));
        }
        drop(both);
        eventually("their blocks are free", || engine.is_idle());
    }
    assert!(engine.metric("laxity_engine_abandoned_total") >= 2.0);
    engine.complete(&prompt(3, 40), 3);
}

#[test]
fn answers_are_the_same_whatever_the_chunks_the_company_and_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    for moe in [false, true] {
        let prompts: Vec<Vec<u32>> = (0..6)
            .map(|n| {
                // Those of a pair begin alike.
                let mut tokens = prompt(n / 2, 60);
                tokens.extend(prompt(n, 5 + 17 * n as usize));
                tokens
            })
            .collect();
        let config = with_model(moe, "schedule = { tokens = 1024 }");
        let alone = alone(folder.path(), &config, &prompts, 12);
        assert!(alone.iter().any(|text| text != &alone[0]), "{alone:?}");
        // Small chunks, a cache so small that blocks are taken away, everything at once, twice.
        let schedule = "schedule = { tokens = 23, policy = 'edf' }";
        let config =
            with_model(moe, &format!("{schedule}\nkv = {{ blocks = 40, block_tokens = 8 }}"));
        let engine = Running::start(folder.path(), "together", &config);
        for _ in 0..2 {
            assert_eq!(engine.complete_all(&prompts, 12), alone, "moe {moe}");
        }
        eventually("all blocks are free", || engine.is_idle());
        // Requests that ran together may have taken each other's blocks. A single one reuses KV.
        for _ in 0..2 {
            assert_eq!(engine.complete(&prompts[0], 12), alone[0], "moe {moe}");
        }
        let found = engine.metric("laxity_engine_prompt_tokens_found_total");
        assert!(found > 0.0, "the cache was of no use");
        assert!(engine.terminate());
    }
}

#[test]
fn under_every_policy_answers_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let prompts: Vec<Vec<u32>> =
        (0..8).map(|number| prompt(number, 20 + 23 * number as usize)).collect();
    let headers = [
        "x-slo-ttft-ms: 60000\r\nx-laxity-importance: paid\r\n",
        "x-slo-ttlt-ms: 90000\r\n",
        // No policy can meet these objectives.
        "x-slo-ttft-ms: 1\r\n",
        "x-slo-ttlt-ms: 100\r\nx-laxity-importance: free\r\n",
    ];
    let alone = alone(folder.path(), &model(false), &prompts, 9);
    let policies = ["fcfs", "edf", "srpf", "qoserve", "hmas"].map(|policy| (policy, "sjf"));
    for (policy, order) in policies.into_iter().chain([("hmas", "srtf")]) {
        let kv = "kv = { blocks = 60, block_tokens = 8 }";
        let policy = format!("policy = '{policy}', hmas = {{ order = '{order}' }}");
        let config = with_model(false, &format!("schedule = {{ tokens = 48, {policy} }}\n{kv}"));
        let engine = Running::start(folder.path(), "policy", &config);
        for _ in 0..2 {
            std::thread::scope(|scope| {
                let ask = |number: usize| {
                    let prompt = &prompts[number];
                    let body = serde_json::json!({
                        "prompt": prompt, "max_tokens": 9, "ignore_eos": true
                    });
                    let headers = headers[number % headers.len()];
                    engine.post("/v1/completions", headers, &body.to_string())
                };
                let answers: Vec<_> =
                    (0..prompts.len()).map(|number| scope.spawn(move || ask(number))).collect();
                for (answer, expected) in answers.into_iter().zip(&alone) {
                    let answer = answer.join().unwrap();
                    assert_eq!(answer.status, 200, "{policy}: {}", engine.explain());
                    assert_eq!(answer.json()["choices"][0]["text"], **expected, "{policy}");
                }
            });
        }
        assert_eq!(engine.metric("laxity_engine_batches_failed_total"), 0.0);
        assert!(engine.terminate(), "{policy}");
    }
}
