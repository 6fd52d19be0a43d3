"""Writes the trained model as a folder of transformers, and asks a server of it to go on.

    python -m examples.serve
    python -m cudnn_ops serve demo_output/llama

The model is the one that `examples.train_llama` trains. What belongs here: the folder, the question
and the command line; the server is `cudnn_ops.server`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig as TransformersConfig
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cudnn_ops.generation import Engine
from cudnn_ops.integrations.transformers_serving import load_model, load_tokenizer
from cudnn_ops.server import AsyncEngine
from cudnn_ops.server.app import create_app
from cudnn_ops.server.running import serve_in_thread
from examples.generate import GenerateConfig, load_checkpoint
from examples.llama import Llama
from examples.train_llama import TrainConfig, check_seed, kind_of_device

#: Of the model's parts, those of transformers.
PARTS = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
PAGE = 16


@dataclass(frozen=True)
class ServeConfig:
    """The command line's choices."""

    checkpoint: Path = GenerateConfig.checkpoint
    out: Path = TrainConfig.out / "llama"
    device: str = "auto"
    prompt: str = "The value of the expression is"
    max_tokens: int = 120
    temperature: float = 0.7
    seed: int = 0


def as_transformers(model: Llama) -> LlamaForCausalLM:
    """The same model, of transformers' code."""
    sizes = model.config
    config = TransformersConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.sequence,
        rms_norm_eps=torch.finfo(torch.float32).eps,  # torch's, where none is named
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = LlamaForCausalLM(config)
    weights = model.state_dict()
    renamed = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "lm_head.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    for layer in range(sizes.layers):
        for ours, part in PARTS.items():
            renamed[f"model.layers.{layer}.{part}.weight"] = weights[
                f"blocks.{layer}.{ours}.weight"
            ]
    theirs.load_state_dict(renamed)
    return theirs


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes, whose numbers are the tokens."""
    # The letters that stand for bytes in tokenizers of GPT-2's kind.
    shown = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (32, 160, 173)]
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def write_folder(config: ServeConfig) -> None:
    """Writes the trained model and its tokenizer as transformers does.

    Raises:
        FileNotFoundError: there is no checkpoint; the message says how to get one.
        ValueError: the file is something else.
    """
    model = load_checkpoint(config.checkpoint)
    as_transformers(model).save_pretrained(config.out)
    byte_tokenizer().save_pretrained(config.out)


def ask(config: ServeConfig) -> str:
    """What a server of the folder answers, on this machine, through its route."""
    model = load_model(config.out, device=kind_of_device(config.device))
    tokenizer = load_tokenizer(config.out)
    cache = model.cache(4 * -(-model.max_length // PAGE), PAGE)
    engine = Engine(model, cache, max_length=model.max_length, decode=tokenizer.decode)
    serving = AsyncEngine(engine, vocabulary=model.vocabulary, decode=tokenizer.decode)
    question = {
        "prompt": config.prompt,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
    }
    with serve_in_thread(create_app(serving, tokenizer, config.out.name)) as url:
        request = Request(
            f"{url}/v1/completions",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request) as response:
            answer: str = json.load(response)["choices"][0]["text"]
    return answer


def parse_args(argv: Sequence[str] | None = None) -> ServeConfig:
    """The command line as a ServeConfig."""
    default = ServeConfig()
    parser = argparse.ArgumentParser(
        description="Serve the trained model with cudnn_ops, and ask it once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, default=default.checkpoint, help="the model")
    parser.add_argument("--out", type=Path, default=default.out, help="the folder to write")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default=default.device)
    parser.add_argument("--prompt", default=default.prompt, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="bytes to add")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0: greedy")
    parser.add_argument("--seed", type=int, default=default.seed, help="of sampling")
    config = ServeConfig(**vars(parser.parse_args(argv)))
    check_seed(parser, config.seed)
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """The program; arguments that only it can judge end it with a line and status 2."""
    config = parse_args(argv)
    torch.set_num_threads(1)  # the model is so small that threads wait for each other
    try:
        write_folder(config)
        answer = ask(config)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"--- {config.prompt}\n+++ {answer}\n")
    print(f"serve it: python -m cudnn_ops serve {config.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
