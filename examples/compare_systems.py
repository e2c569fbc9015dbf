"""Compare two systems on a task, three seeds each, and read the result as a table.

Stopped and started again, it goes on where it stopped. Usage: compare_systems.py [STEPS]
"""

import json
import statistics
import sys

import sable

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
what = {
    "systems": ["sable", "ippo"],
    "num_seeds": 3,
    "total_steps": steps,
    "num_envs": 16,
    "rollout_length": 32,
}
what |= {"num_evaluations": 4, "video": False}

outcome = sable.benchmark("lbf/2s-8x8-2p-2f-coop", **what, quiet=True)
if outcome.failures or outcome.interrupted is not None:
    sys.exit("\n".join(outcome.failures) or "interrupted: start it again")

print(f"{'task':24}{'system':16}{'mean':>8}{'least':>8}{'greatest':>10}{'steps/s':>10}")
for cell in sable.grid("lbf/2s-8x8-2p-2f-coop", **what):
    summary = json.loads((cell.directory / "summary.json").read_text())
    returns = summary["absolute_return"]  # one per seed: the best parameters on fresh episodes
    mean, pace = statistics.mean(returns), summary["steps_per_second"]
    print(
        f"{summary['task']:24}{summary['system']:16}{mean:8.3f}{min(returns):8.3f}{max(returns):10.3f}{pace:10.0f}"
    )

page, notes = sable.report("benchmark")  # curves, intervals and who wins, in one page that opens offline
print("\n".join(notes))
print(page)
