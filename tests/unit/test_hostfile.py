"""Hostfiles, and how replicas share their slots; DeepSpeed's own parser must understand the result."""

import pytest
from deepspeed.launcher import runner

from noloco_mega import cli, hostfile


def write(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


@pytest.mark.parametrize("replicas, size", [(1, 12), (2, 4), (3, 4), (4, 2), (12, 1), (2, 5)])
def test_replicas_take_disjoint_slots_in_order(tmp_path, replicas, size):
    path = write(tmp_path, "# the cluster\nn1 slots=4\n\nn2   slots=4 # second\nn3 slots=4\n")
    pool = runner.fetch_hostfile(str(path))
    assert hostfile.read(path) == pool == {"n1": 4, "n2": 4, "n3": 4}
    taken = []
    for share in hostfile.shares(pool, replicas, size):
        active = runner.parse_inclusion_exclusion(pool, hostfile.spoken(share), "")
        assert active == share
        taken += [(host, slot) for host, slots in active.items() for slot in slots]
    assert taken == [(host, slot) for host in pool for slot in range(4)][: replicas * size]


@pytest.mark.parametrize(
    "text, message",
    [
        ("n1 slots=4\nn2\n", 'line 2: "n2" is not "HOST slots=N"'),
        ("n1 slots=0\n", "line 1"),
        ("n1 slots=2\nn1 slots=2\n", "n1 is listed twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        hostfile.read(write(tmp_path, text))


def test_the_command(tmp_path, capsys):
    config = "configs/demo_noloco_random_4x2.json"
    path = write(tmp_path, "n1 slots=6\nn2 slots=2\n")
    assert cli.main(["hosts", "--config", config, "--hostfile", str(path)]) == 0
    assert capsys.readouterr().out.split() == ["n1:0,1", "n1:2,3", "n1:4,5", "n2:0,1"]
    path.write_text("n1 slots=6\n")
    assert cli.main(["hosts", "--config", config, "--hostfile", str(path)]) == 2
    assert "has 6 slots, but 4 replicas of 2 ranks need 8" in capsys.readouterr().err
