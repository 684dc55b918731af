"""Every model family on 2 x 2 ranks, both ways."""

import pytest

from tests.dist.test_start import check_family
from tests.unit.test_hf import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_imported_weights_on_two_by_two_ranks(tmp_path, family):
    check_family(tmp_path, family)
