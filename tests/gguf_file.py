"""A model as a GGUF file, for tests."""

import json

import numpy as np

from fastweights.hf.export import tokenizer_of
from fastweights.text.tokenizer import Bytes


def write_gguf(path, model):
    """A llama as llama.cpp writes it, with a tokenizer of single bytes."""
    import gguf

    c, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_vocab_size(c.vocab_size)
    inner = json.loads(tokenizer_of(Bytes()).backend_tokenizer.to_str())
    tokens = [t for t, _ in sorted(inner["model"]["vocab"].items(), key=lambda x: x[1])] + ["<|start|>"]
    tokens[1] = "ab"  # there must be a merge; no text here holds one or the other
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    for name, x in weights.items():
        x = x.numpy()
        if name not in whole:
            _, _, i, rest = name.split(".", 3)
            part = names[rest.removesuffix(".weight")]
            if part in ("attn_q", "attn_k"):
                heads = c.num_attention_heads if part == "attn_q" else c.num_key_value_heads
                x = x.reshape(heads, 2, len(x) // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(whole.get(name) or f"blk.{i}.{part}.weight", np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
