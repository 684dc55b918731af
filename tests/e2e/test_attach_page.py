"""docs/attach.md, as printed: the program and its launches."""

import re
import sys

from noloco_mega.comm.rendezvous import RendezvousServer
from tests.e2e.conftest import ROOT
from tests.e2e.runs import SECRET
from tests.e2e.test_launchers import ended, start


def test_the_page_runs_as_printed(tmp_path):
    page = (ROOT / "docs" / "attach.md").read_text()
    program = tmp_path / "train.py"
    program.write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    assert "torchrun --standalone --nproc-per-node 1 train.py" in page
    server = RendezvousServer(SECRET.encode())
    variables = {"NOLOCO_RENDEZVOUS": "{}:{}".format(*server.address), "NOLOCO_SECRET": SECRET, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", program, "40"]
    try:
        replicas = [start(words, tmp_path, NOLOCO_REPLICA=str(replica), **variables) for replica in range(2)]
        for replica, (status, output) in enumerate([ended(process) for process in replicas]):
            assert status == 0, output
            assert re.search(
                rf"replica {replica}: loss [\d.]+ after 2 outer steps, .*received=\({1 - replica},\)", output
            )
    finally:
        server.close()
