"""What there is to do on a GPU: the jobs, by the calls of ten minutes that do them, in order of importance."""

import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path

READY = "ready-"  # before the name of a job: it runs in small, beside others, so that its kernels lie compiled on disk


@dataclass(frozen=True)
class Job:
    """A command of Python.

    Attributes:
        arguments: of the interpreter. In them stand, in capitals, what a call fills in: JSON, a file for numbers;
            SCRATCH, a new folder that is removed afterwards; STDLIB, Python's own library; MODEL and TEXT, what was
            brought along.
        seconds: that it should take on an H200. It begins where so many are left, and is ended after twice as many and
            half a minute; preparation, whose name begins with READY, after as many.
        alone: whether it needs the GPU to itself. Those that do not, and follow each other, run side by side.
        needs: a module without which it is left out.
    """

    arguments: str
    seconds: int
    alone: bool = True
    needs: str = ""

    def missing(self, brought: dict[str, Path | None]) -> str:
        """Why it cannot run here, or nothing.

        brought: what was brought along, by the word for it, None for what was not; PEERS is a folder of modules.
        """
        for word, path in brought.items():
            if word in self.arguments.split() and path is None:
                return f"it needs --{word.lower()}"
        peers = brought.get("PEERS")
        where = [*sys.path, *([str(peers)] if peers else [])]
        if self.needs and importlib.machinery.PathFinder.find_spec(self.needs, where) is None:
            return f"{self.needs} is not installed, and not in --peers"
        text = brought.get("TEXT")
        if "TEXT" in self.arguments.split() and text is not None and not (text / "pages.npz").exists():
            return f"{text} has no pages.npz, which `benchmarks/learning_while_reading prepare` writes"
        return ""


def bench(arguments: str, seconds: int, alone: bool = True, needs: str = "") -> Job:
    """A job of `fastweights bench` on the GPU."""
    return Job(f"-m fastweights bench {arguments} --device cuda --json JSON", seconds, alone, needs)


TESTS = (
    "fwl_loss", "fwl_refresh", "fwl_train", "kernels", "kernels_bench", "kernels_convolution", "kernels_features",
    "kernels_fwl", "kernels_fwl_dual", "kernels_general", "kernels_maps", "kernels_mixer", "kernels_rotary",
    "kernels_step", "kernels_swiglu", "launch", "layers_torch", "shared", "speed",
)  # fmt: skip
WIDE, NARROW = "--shape 8,4096,16,128 --shape 4,2048,16,128", "--shape 1,32768,32,64,128"
SMALL = {WIDE: "--shape 2,1024,16,128", NARROW: "--shape 1,1024,32,64,128"}  # with the kernels of the large ones
OURS = "memory --method kernel --rule"


def beside_fla(rule: str, shapes: str, seconds: int, alone: bool = True) -> Job:
    """A memory with a decay per channel beside FLA's."""
    return bench(f"{OURS} {rule} --decay channel --peer FLA {shapes}", seconds, alone, "fla")


FLA = {"kda-128": ("delta", WIDE), "kda-64": ("delta", NARROW), "gla-128": ("sum", WIDE), "gla-64": ("sum", NARROW)}
FIRST = {
    "kernels": Job("-m benchmarks.check_kernels --quick --json JSON", 200, alone=False),
    **{f"test_{name}": Job(f"-m pytest -q -p no:cacheprovider tests/test_{name}.py", 150, False) for name in TESTS},
    **{
        f"{READY}{name}": beside_fla(rule, f"{SMALL[shapes]} --repeats 1", 150, alone=False)
        for name, (rule, shapes) in FLA.items()
    },
    "decay": bench(f"{OURS} delta --decay none --decay head --decay channel --peer none {WIDE} {NARROW}", 50),
    "first-calls": Job("-m benchmarks.first_calls --json JSON", 60),
    **{name: beside_fla(rule, shapes, 55) for name, (rule, shapes) in FLA.items()},
}  # fmt: skip

TRAIN = {
    "train-8x512": bench("train --size '8 x 512' --vocab 8192 --head linear", 45),
    "train-12x768": bench("train --size '12 x 768' --head linear", 50),
    "train-12x768-4096": bench("train --size '12 x 768' --length 4096 --batch 8 --head linear", 55),
    "train-paper": bench("train --size paper-small --vocab 16384", 45),
    "train-fla": bench("train --size '8 x 512' --vocab 8192 --model deltanet --head linear --peers", 80, True, "fla"),
}
SECOND = {
    "losses": Job(
        "-m benchmarks.eager_and_captured SCRATCH/runs --json JSON --steps 150 --depth 8 --dim 512 --heads 8"
        " --length 1024 --batch 16 --head linear", 110, alone=False,
    ),
    **{f"{READY}{n}": Job(f"{j.arguments} --repeats 3 --no-profile", 110, False, j.needs) for n, j in TRAIN.items()},
    **TRAIN,
    "train-fwl": Job("-m benchmarks.fwl_training --device cuda --json JSON", 80),
    "decode": bench("decode", 60),
}  # fmt: skip

PRETRAINED = (
    "-m benchmarks.pretrained time MODEL STDLIB/_pydecimal.py --tokens 32768 --tf32 --device cuda --json JSON"
    " --out SCRATCH/time.csv --modes static cache body+cache both dynamic"
)
LEARNING = (
    "benchmarks/learning_while_reading run --work TEXT --out SCRATCH/tables --json JSON --length 1024 --batch 32"
    " --most 16384 --valid 4 --dynamic-pages 32 --minutes 3"
)
THIRD = {
    "fwl-jax": bench("fwl --framework jax --precision bfloat16 --repeats 7", 110, True, "flax"),
    "fwl-keras": bench("fwl --framework keras --precision bfloat16 --repeats 7", 100, True, "keras"),
    "pretrained-512": Job(f"{PRETRAINED} --window 512 --stride 256", 65),
    "pretrained-2048": Job(f"{PRETRAINED} --window 2048 --stride 1024 --rounds 2", 75),
    "learning-softmax": Job(f"{LEARNING} --body softmax --seed 1 --window 512 --pages 64", 205, alone=False),
    "learning-lstm": Job(f"{LEARNING} --body lstm --depth 4 --pages 126", 205, alone=False),
}

OTHERS = {  # measured on the code of before; some twelve minutes
    "prompts": bench("decode --context 1024 --context 131072", 60),
    "memory": bench("memory --rule delta --method kernel --peer FLA", 100),
    "fwl": bench("fwl --framework none", 90),
    "hf": bench("hf", 120),
    "host": bench("host --compile --layer deltanet", 90),
    "reading": Job("-m benchmarks.fwl_reading --device cuda", 70),
}

CALLS = {"first": FIRST, "second": SECOND, "third": THIRD, "others": OTHERS}
JOBS = FIRST | SECOND | THIRD | OTHERS
