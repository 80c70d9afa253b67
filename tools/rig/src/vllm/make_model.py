"""Writes a small random Llama that vLLM can load: make_model.py FOLDER JSON.

Only weights are drawn, so this needs neither torch nor transformers, and takes a second. Keys and queries are scaled
up: attention is then sharp, and another KV cache gives other tokens.
"""

import json
import math
import pathlib
import sys

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

folder = pathlib.Path(sys.argv[1])
shape = json.loads(sys.argv[2])
hidden, ffn, layers, vocab = shape["hidden"], shape["ffn"], shape["layers"], shape["vocab"]
heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
draw = numpy.random.default_rng(shape["seed"])


def weight(rows: int, columns: int, scale: float = 1.0) -> numpy.ndarray:
    return (draw.standard_normal((rows, columns)) * scale / math.sqrt(columns)).astype(numpy.float32)


ones = numpy.ones(hidden, dtype=numpy.float32)
weights = {
    "model.embed_tokens.weight": draw.standard_normal((vocab, hidden)).astype(numpy.float32),
    "model.norm.weight": ones,
    "lm_head.weight": weight(vocab, hidden),
}
for layer in range(layers):
    name = f"model.layers.{layer}."
    weights |= {
        name + "input_layernorm.weight": ones,
        name + "post_attention_layernorm.weight": ones,
        name + "self_attn.q_proj.weight": weight(heads * head_dim, hidden, 2.0),
        name + "self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden, 2.0),
        name + "self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
        name + "self_attn.o_proj.weight": weight(hidden, heads * head_dim),
        name + "mlp.gate_proj.weight": weight(ffn, hidden),
        name + "mlp.up_proj.weight": weight(ffn, hidden),
        name + "mlp.down_proj.weight": weight(hidden, ffn),
    }
config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": hidden,
    "intermediate_size": ffn,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": head_dim,
    "vocab_size": vocab,
    "max_position_embeddings": shape["context"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": vocab - 2,
    "eos_token_id": vocab - 1,
}
tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab)}, unk_token="t0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {"bos_token": f"t{vocab - 2}", "eos_token": f"t{vocab - 1}", "unk_token": "t0"}

folder.mkdir(parents=True, exist_ok=True)
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
(folder / "config.json").write_text(json.dumps(config, indent=1))
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(
    json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape["context"], **special})
)
