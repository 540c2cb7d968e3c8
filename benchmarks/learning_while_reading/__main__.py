"""Learning while reading at scale: what each way to learn from a page gains on the pages of enwik8.

    python benchmarks/learning_while_reading prepare --text enwik8 --work W
    python benchmarks/learning_while_reading words --text wikitext-2 --work W          (in its place, for words)
    python benchmarks/learning_while_reading body --work W --body gated-delta --minutes 5
    python benchmarks/learning_while_reading tune --work W --body gated-delta --minutes 1.5
    python benchmarks/learning_while_reading score --work W --body gated-delta --out results --minutes 8
    python benchmarks/learning_while_reading speed --work W --body gated-delta --out results
    python benchmarks/learning_while_reading table --work W --body gated-delta --out results
    python benchmarks/learning_while_reading gather --out results
    python benchmarks/learning_while_reading report
    python benchmarks/learning_while_reading run --work W --body softmax --minutes 8    (body, tune, score, table)

`prepare` splits the text at `<page>`, trains a tokenizer, unless W has one, and encodes. `body` trains a language model
whose last layer is a Fast Weight Layer that does not learn. `tune` trains that layer and its steps through their own
learning, the rest frozen: the published sum, and gradients at the current weights every 16, 64 and 256 tokens. `score`
scores held-out pages, every token before it is learned from, in every arm; it goes on where it stopped, and several
processes may score different --arms at once. `speed` times the arms one page at a time. `table` writes CSV files: the
loss of each page, by position, frequency and repetition, and one line per arm. `gather` puts those of all bodies into
docs/results; `report` prints the tables and draws the figure of the page there. `run` takes one body through the stages
from `body` to `table`, side by side where they can be; 32 of the pages are read by dynamic evaluation, the slowest arm.

W holds what is large: tokens, weights, losses per page.
"""

import argparse
from pathlib import Path

import torch
from arms import score
from pages import prepare, words
from report import gather, gather_long, report
from run import run
from table import speed, table
from training import train_body, tune

STAGES = dict(
    prepare=prepare,
    words=words,
    body=train_body,
    tune=tune,
    score=score,
    speed=speed,
    table=table,
    gather=gather,
    gather_long=gather_long,
    report=report,
    run=run,
)


def main():
    """Run the stage that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for tokens, weights and losses")
    parser.add_argument("--text", type=Path, help="the text, split at <page>; for words, the folder")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for CSV files")
    parser.add_argument("--json", type=Path, help="file for the tables of run")
    parser.add_argument("--bytes", type=int, default=0, help="read so much of the text; 0 for all")
    parser.add_argument("--vocab", type=int, default=16_383)
    parser.add_argument("--held-out", type=float, default=0.12, help="share of the pages that are not trained on")
    parser.add_argument("--body", default="gated-delta", help="gated-delta, softmax, lstm or another mixer")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a training window")
    parser.add_argument("--window", type=int, default=1024, help="tokens that softmax attention looks back")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layer-lr", type=float, default=1e-3, help="of the layer's weights in tune")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, of each layer in tune, or of scoring")
    parser.add_argument(
        "--refresh", type=int, nargs="*", default=[64, 16, 256, 0], help="for tune; 0 is the published sum"
    )
    parser.add_argument("--least", type=int, default=4096, help="tokens of the shortest page to score")
    parser.add_argument("--most", type=int, default=65_536, help="tokens of a page that are scored")
    parser.add_argument("--pages", type=int, default=120, help="pages to score")
    parser.add_argument("--dynamic-pages", type=int, default=32, help="pages that run reads by dynamic evaluation")
    parser.add_argument("--valid", type=int, default=6, help="pages to choose rates on")
    parser.add_argument("--tune-tokens", type=int, default=4096, help="tokens of each of them")
    parser.add_argument("--tune-length", type=int, default=0, help="tokens of a window of tune; 0 for --length")
    parser.add_argument("--cache", type=int, default=2048, help="window of the neural cache")
    parser.add_argument("--arms", nargs="*", default=[], help="names, or patterns such as cache*; all when absent")
    parser.add_argument("--wait", default="", help="layer that score waits for, pages read: 64, sum or 64-long")
    parser.add_argument("--together", type=int, default=32, help="pages that dynamic evaluation reads side by side")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the pages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    STAGES[args.stage](args)


if __name__ == "__main__":
    main()
