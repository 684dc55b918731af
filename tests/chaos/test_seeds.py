"""Twenty blows to a run of four replicas, for each of three seeds, against a run that nothing happens to."""

import pytest

from tests.chaos.network import missing
from tests.chaos.plan import draw
from tests.chaos.run import ENDLESS, SETTINGS, report, strike, undisturbed

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_blows_leave_the_run_as_good_as_it_was(seed, tiny, tmp_path):
    struck = strike(tiny(run__steps=ENDLESS, **SETTINGS), draw(seed, 20, 4, 2), tmp_path / "struck")
    steps = max(struck.steps_trained() // 4, 1)
    calm = undisturbed(tiny(run__steps=steps, run__name="calm", **SETTINGS), tmp_path / "calm")
    report(calm)
    assert struck.spread(3) <= 2 * calm.spread(3)
    # On the same tokens the struck run has taken more, smaller steps, since the dead read none: it may well be better.
    assert struck.validation_loss() <= 1.03 * calm.validation_loss()
