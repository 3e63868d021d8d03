"""The covariance of the refitted scaling law in the catalog (scaling_laws.toml, besiroglu), from the published points.

    python tools/scaling_law_errors.py svg_extracted_data.csv [bootstraps]

The file is github.com/Besiroglu/data, svg_extracted_data.csv: 245 points that Besiroglu et al. 2024 (arXiv 2404.10102)
took from a figure of Hoffmann et al. 2022. As there, the first five are left out, a Huber loss (delta = 1e-3) of log
losses is summed and minimized by L-BFGS, and points are drawn again with replacement.
"""

from __future__ import annotations

import argparse
import csv
from math import log

import numpy as np
import torch

OUTLIERS, DELTA = 5, 1e-3
PUBLISHED = (log(482.01), log(2085.43), log(1.8172), 0.3478, 0.3658)  # where the search starts


def fit(points: torch.Tensor, weights: torch.Tensor, start: np.ndarray) -> np.ndarray:
    """(ln A, ln B, ln E, alpha, beta) of points (ln N, ln D, ln L), each counted as often as its weight says."""
    log_n, log_d, log_loss = points
    theta = torch.tensor(start, requires_grad=True)
    search = torch.optim.LBFGS(
        [theta], max_iter=3000, max_eval=6000, tolerance_grad=1e-11, tolerance_change=1e-14, history_size=30,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> torch.Tensor:
        search.zero_grad()
        a, b, e, alpha, beta = theta
        told = torch.logsumexp(torch.stack([a - alpha * log_n, b - beta * log_d, e.expand_as(log_n)]), 0)
        off = (told - log_loss).abs()
        huber = torch.where(off < DELTA, off**2 / 2, DELTA * (off - DELTA / 2))
        total = 1e4 * (huber * weights).sum()
        total.backward()
        return total

    for _ in range(2):
        search.step(closure)  # type: ignore[no-untyped-call]
    return theta.detach().numpy().copy()


def main(path: str, bootstraps: int = 1500) -> None:
    torch.set_default_dtype(torch.float64)
    with open(path) as file:
        rows = list(csv.DictReader(file))[OUTLIERS:]
    n = np.array([float(row["Model Size"]) for row in rows])
    d = np.array([float(row["Training FLOP"]) for row in rows]) / (6 * n)
    loss = np.array([float(row["loss"]) for row in rows])
    points = torch.tensor(np.log(np.stack([n, d, loss])))
    best = fit(points, torch.ones(len(rows)), np.array(PUBLISHED))
    print(f"{len(rows)} points: A {np.exp(best[0]):.4g}, B {np.exp(best[1]):.4g}, E {np.exp(best[2]):.5g}, "
          f"alpha {best[3]:.4f}, beta {best[4]:.4f}")  # fmt: skip
    draw = np.random.default_rng(0)
    drawn = []
    for _ in range(bootstraps):
        counts = np.bincount(draw.integers(0, len(rows), len(rows)), minlength=len(rows))
        drawn.append(fit(points, torch.tensor(counts, dtype=torch.float64), best))
    covariance = np.cov(np.array(drawn).T)
    print("standard errors of (ln A, ln B, ln E, alpha, beta):", np.sqrt(np.diag(covariance)).round(4))
    print("covariance = [")
    for row in covariance:
        print("  [" + ", ".join(f"{each:.10e}" for each in row) + "],")
    print("]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("bootstraps", type=int, nargs="?", default=1500)
    main(**vars(parser.parse_args()))
