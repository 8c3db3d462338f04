#!/usr/bin/env python3
"""Complete a prompt with a GLM-5.x checkpoint; without --model, with the small embedded one.

The completion goes to standard output, everything else to standard error. Exit codes: 0 done,
1 the model or the prompt cannot be used, 2 wrong arguments, 130 interrupted.
"""

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

PARAMETERS: dict[str, type] = {
    "max_new_tokens": int,
    "min_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the embedded one)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to complete; - or nothing: standard input")
    source.add_argument("--prompt-file", type=Path, help="a UTF-8 file with the text to complete")
    for name, kind in PARAMETERS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper())
    parser.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    parser.add_argument("--include-stop", action="store_true", default=None)
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument("--stats", action="store_true", help="print token counts and speed")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kv-cache-tokens", type=int, metavar="INT")
    return parser.parse_args()


def read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is not None:
        return arguments.prompt_file.read_text(encoding="utf-8")
    if arguments.prompt not in (None, "-"):
        return arguments.prompt
    if sys.stdin.isatty():
        print("Reading the prompt from standard input (end it with Ctrl-D).", file=sys.stderr)
    return sys.stdin.buffer.read().decode("utf-8")


def run(arguments: argparse.Namespace) -> None:
    import glm53  # after the arguments: --help and mistakes in them answer at once

    prompt = read_prompt(arguments)
    folder = arguments.model or Path(glm53.__file__).parent / "data" / "nano"
    fields = {name: getattr(arguments, name) for name in PARAMETERS}
    params = glm53.SamplingParams(
        **fields,
        stop=arguments.stop,
        include_stop=arguments.include_stop,
        ignore_eos=arguments.ignore_eos,
    )
    model = glm53.GLM53.from_pretrained(
        folder,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_cache_tokens=arguments.kv_cache_tokens,
        progress=sys.stderr.isatty(),
    )
    completion = None
    # Closing the stream on the way out, Ctrl-C included, gives back what the request holds.
    with contextlib.closing(model.stream(prompt, params)) as deltas:
        for delta in deltas:
            completion = delta.completion
            if arguments.stream:
                print(delta.text, end="", flush=True)
    assert completion is not None
    print("" if arguments.stream else completion.text, flush=True)
    if completion.error is not None:
        raise ValueError(completion.error)
    if arguments.stats:
        print_stats(completion)


def print_stats(completion) -> None:
    metrics = completion.metrics
    speed = metrics.tokens_per_second
    print(
        f"prompt {len(completion.prompt_token_ids)} tokens, new {len(completion.token_ids)} "
        f"tokens, finish reason {completion.finish_reason}, "
        f"first token after {metrics.ttft:.3f} s, "
        f"{'-' if speed is None else format(speed, '.1f')} tokens/s",
        file=sys.stderr,
    )


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        run(arguments)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (| head). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
