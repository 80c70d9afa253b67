//! Tests of the model catalogue.

use super::*;

fn billions(model: &str) -> (f64, f64) {
    let model = Model::named(model).unwrap();
    (model.parameters() as f64 / 1e9, model.active_parameters() as f64 / 1e9)
}

#[test]
fn built_in_models_have_as_many_parameters_as_their_makers_say() {
    // Parameters in total / active: Mixtral 46.7 / 12.9 and 141 / 39, DBRX 132 / 36, Grok-2 269.5 /
    // 115, Qwen3-Coder 480 / 35, Qwen3-Coder-Next 80 / 3 (79 without the embedding), Llama 8.03 and
    // 70.6.
    for (name, all, active) in [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.1),
        ("dbrx", 131.6, 36.5),
        ("grok-2", 269.5, 115.0),
        ("qwen3-coder-480b", 480.0, 35.4),
        ("qwen3-coder-next", 79.7, 3.9),
        ("llama-3-8b", 8.03, 8.03),
        ("llama-3-70b", 70.6, 70.6),
    ] {
        let found = billions(name);
        assert!((found.0 / all - 1.0).abs() < 0.01, "{name}: {found:?}");
        assert!((found.1 / active - 1.0).abs() < 0.02, "{name}: {found:?}");
    }
}

#[test]
fn built_in_models_go_by_their_names() {
    let models = Model::built_in();
    assert_eq!(models.len(), 8);
    for model in models {
        assert_eq!(Model::named(&model.name).unwrap(), model);
    }
}

#[test]
fn kv_bytes_are_keys_and_values_of_all_heads() {
    // Llama 3 8B: 2 · 8 heads · 128 · 2 bytes.
    let llama = Model::named("llama-3-8b").unwrap();
    assert_eq!(llama.kv_bytes_per_token(0), 4096);
    assert_eq!(llama.state_bytes(0), 0);
    assert_eq!(llama.activation_bytes(), 8192);
}

#[test]
fn a_hybrid_keeps_kv_in_every_fourth_layer_and_a_state_in_the_others() {
    let hybrid = Model::named("qwen3-coder-next").unwrap();
    let full: Vec<u16> =
        (0..hybrid.layers).filter(|&layer| hybrid.is_full_attention(layer)).collect();
    assert_eq!(full, (0..12).map(|i| 4 * i + 3).collect::<Vec<_>>());
    assert_eq!(hybrid.kv_bytes_per_token(0), 0);
    assert_eq!(hybrid.kv_bytes_per_token(3), 2 * 2 * 256 * 2);
    // The state has 32 heads of 128 × 128 with 4 bytes, and 3 inputs of 8192 with 2 bytes.
    assert_eq!(hybrid.state_bytes(0), 32 * 128 * 128 * 4 + 3 * 8192 * 2);
    assert_eq!(hybrid.state_bytes(3), 0);
}

fn from_file(text: &str) -> Result<Model, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, text).unwrap();
    Model::named(path.to_str().unwrap())
        .map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

const MINE: &str = "name = 'mine'\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nhead_dim = \
    16\n\
                    ffn = 128\nvocab = 100\n";

#[test]
fn a_users_file_is_a_model() {
    let mine = from_file(MINE).unwrap();
    assert_eq!((mine.experts, mine.top_k, mine.shared_ffn), (1, 1, 0));
    assert_eq!(mine.kv_bytes_per_token(1), 2 * 2 * 16 * 2);
}

#[test]
fn errors_say_file_line_field_and_what_was_expected() {
    for (from, to, error) in [
        (
            "hidden = 64",
            "hidden = 'wide'",
            "mine.toml, line 3: `hidden`: invalid type: string \"wide\", expected u32",
        ),
        ("hidden = 64\n", "", "mine.toml: missing field `hidden`"),
        (
            "kv_heads = 2",
            "kv_heads = 3",
            "mine.toml, line 5: `kv_heads`: expected a divisor of `heads`, 4",
        ),
        ("vocab = 100", "vocab = 0", "mine.toml, line 8: `vocab`: expected 1 to 16777216"),
        (
            "vocab = 100",
            "vocab = 100\ntop_k = 2",
            "mine.toml, line 9: `top_k`: expected at most `experts`, 1",
        ),
        (
            "vocab = 100",
            "vocab = 100\nfull_attention_every = 4",
            "mine.toml, line 9: `full_attention_every`: expected 1, or a table \
             [linear_attention] for the other layers",
        ),
        (
            "vocab = 100",
            "vocab = 100\n[linear_attention]\nkey_heads = 0\nvalue_heads = 1\nkey_dim = 1\n\
             value_dim = 1\nconvolution = 4\nstate_bytes_per_value = 4",
            "mine.toml, line 10: `linear_attention.key_heads`: expected 1 to 65536",
        ),
    ] {
        assert!(MINE.contains(from));
        assert_eq!(from_file(&MINE.replace(from, to)).unwrap_err(), error);
    }
    let unknown = from_file(&MINE.replace("vocab = 100", "vocabulary = 100")).unwrap_err();
    assert!(
        unknown.starts_with("mine.toml, line 8: unknown field `vocabulary`, expected one of"),
        "{unknown}"
    );
}

#[test]
fn sizes_whose_product_is_too_large_are_refused() {
    let large = "hidden = 16777216\nffn = 16777216\nexperts = 16777216\nheads = 4";
    let text = MINE.replace("hidden = 64\nheads = 4", large).replace("ffn = 128\n", "");
    let error = from_file(&text).unwrap_err();
    assert!(error.contains("line 2: `layers`: expected sizes with at most 10000"), "{error}");
}

#[test]
fn an_unknown_name_is_told_what_there_is() {
    let error = Model::named("gpt-7").unwrap_err().to_string();
    assert!(error.contains("dbrx, grok-2, llama-3-8b"), "{error}");
    let error = Model::named("no/such.toml").unwrap_err().to_string();
    assert!(error.starts_with("cannot read no/such.toml: "), "{error}");
}
