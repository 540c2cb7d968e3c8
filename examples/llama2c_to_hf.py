"""A llama2.c checkpoint (such as stories260K) as a Hugging Face folder: python examples/llama2c_to_hf.py BIN TOKENS DIR

BIN is the weights, TOKENS the tokenizer file beside them (tok512.bin); DIR is made.
"""

import struct
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def read_model(path: Path) -> LlamaForCausalLM:
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", data[:28])
    numbers, at = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy()), 0
    width = dim // heads

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        n = int(np.prod(shape))
        at += n
        return numbers[at - n : at].view(shape)

    def halves(x: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotary pairs (0, 1), (2, 3), ... as (0, half), (1, half + 1), ..."""
        L, rows, columns = x.shape
        return x.view(L, heads, rows // heads // 2, 2, columns).transpose(2, 3).reshape(x.shape)

    embedding = take(abs(vocab), dim)
    per_layer = {"input_layernorm": take(layers, dim), "self_attn.q_proj": halves(take(layers, dim, dim), heads)}
    per_layer["self_attn.k_proj"] = halves(take(layers, kv_heads * width, dim), kv_heads)
    per_layer["self_attn.v_proj"] = take(layers, kv_heads * width, dim)
    per_layer["self_attn.o_proj"] = take(layers, dim, dim)
    per_layer["post_attention_layernorm"] = take(layers, dim)
    per_layer["mlp.gate_proj"] = take(layers, hidden, dim)
    per_layer["mlp.down_proj"] = take(layers, dim, hidden)
    per_layer["mlp.up_proj"] = take(layers, hidden, dim)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(dim)}
    take(2, length, width // 2)  # tables of cosines and sines
    weights["lm_head.weight"] = embedding if vocab > 0 else take(-vocab, dim)
    for name, x in per_layer.items():
        weights |= {f"model.layers.{i}.{name}.weight": x[i] for i in range(layers)}
    config = LlamaConfig(
        vocab_size=abs(vocab), hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=vocab > 0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model


def read_tokenizer(path: Path, size: int) -> PreTrainedTokenizerFast:
    data, at, pieces = path.read_bytes(), 4, []
    for _ in range(size):
        _score, length = struct.unpack_from("fi", data, at)
        pieces.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    pieces[3:259] = [f"<0x{b:02X}>" for b in range(256)]
    pieces[259:] = [p.replace(" ", "▁") for p in pieces[259:]]
    vocab = {p: i for i, p in enumerate(pieces)}
    # earlier pieces were merged first; every way to make a piece of two others has its rank
    merges = [(p[:n], p[n:]) for p in pieces[259:] for n in range(1, len(p)) if p[:n] in vocab and p[n:] in vocab]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   model_input_names=["input_ids", "attention_mask"])  # fmt: skip


def main() -> None:
    weights, tokens, target = map(Path, sys.argv[1:])
    model = read_model(weights)
    model.save_pretrained(target)
    read_tokenizer(tokens, model.config.vocab_size).save_pretrained(target)
    print(f"Written to {target}")


if __name__ == "__main__":
    main()
