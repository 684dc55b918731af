"""A run that ends in a consensus of its replicas."""

import numpy as np

from noloco_mega import config as configs
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.merging import deviation
from tests.e2e.runs import run


def test_final_weights_are_the_mean_that_the_replicas_agree_on(tiny, tmp_path):
    """The last checkpoint is from before the rounds: the mean of its masters is what the weights must be."""
    topology = {"replicas": 2, "stages": 2}
    raw = tiny(topology=topology, run__steps=7, run__save_every=7, run__final_consensus=True)
    run(raw, tmp_path)
    config = configs.parse(raw)
    finals = [SavedReplica(config.replica_folder(replica) / "weights") for replica in range(2)]
    step = config.output / "checkpoints" / "step_00000007"
    before = [SavedReplica(step / f"replica_{replica:02d}") for replica in range(2)]
    assert deviation(before) > 10 * config.run.consensus_tolerance > 10 * deviation(finals)
    for name in finals[0].names:
        mean = sum(saved.tensor(name).double().numpy() for saved in before) / 2
        for weights in finals:
            np.testing.assert_allclose(weights.tensor(name).numpy(), mean, rtol=1e-5, atol=1e-6)
    for weights in finals:
        noted = weights.manifest["consensus"]
        assert noted["reached"] and noted["missed"] == [] and noted["rounds"] > 1
