"""Started by torchrun in test_site_ranks.py: a site of several ranks; a second site of one rank trains in a thread of rank 0.

python site_rank_worker.py RUN.toml FOLDER [die]
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from local_swarm import make_peer

from shoal.background import BackgroundTask
from shoal.diloco import LocalHub
from shoal.diloco.ranks import RankLost, Ranks, join_ranks
from shoal.diloco.site.diloco_file import load_diloco_file
from shoal.diloco.site.site import Site


def main(path: str, folder: str, die: str = "") -> Ranks:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = join_ranks(rank=rank, size=size, device="cpu", command_timeout_s=120)
    file, hub, out = load_diloco_file(Path(path)), LocalHub(), Path(folder)
    stop = threading.Event()
    averager = make_peer(hub, min_peers=2) if ranks.leads else None
    site = Site(file, averager, folder=out / "one", device="cpu", peer="one", stop=stop, ranks=ranks)
    if not ranks.leads:
        if die:
            Site._step = lambda self: os._exit(1)  # type: ignore[method-assign]
        site.follow()
    else:
        peer = make_peer(hub, min_peers=2)
        other = Site(file, peer, folder=out / "two", device="cpu", peer="two", stop=stop)
        for one in (site, other):
            one.optimizer.join(deadline_s=60)  # a site that joins late takes fewer steps
        beside = BackgroundTask("other site", lambda: other.train(join_s=60))
        if die:
            # torchrun ends the other ranks when it sees that one has died, perhaps before this one sees it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            site.train(join_s=60)
        except RankLost as lost:
            (out / "lost.txt").write_text(str(lost))
            os._exit(3)
        beside.wait()
        site.close()
        other.close()
    torch.save(dict(site.model.named_parameters()), out / f"rank-{rank}.pt")
    return ranks


if __name__ == "__main__":
    joined = main(*sys.argv[1:])
    joined.leave()
    joined.release()
