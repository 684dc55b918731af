"""When a slower replica ends its inner phase early."""

import pytest

from noloco_mega.plan.lag import STAY, hurry_to


@pytest.mark.parametrize(
    "outer_step, furthest, waiting, expected",
    [
        (5, 4, {}, STAY),  # nobody is further
        (5, 5, {5: 0.0}, STAY),  # others have begun it, the partner has not come
        (5, 5, {5: 2.9}, STAY),  # it waits, and not for long
        (5, 5, {5: 3.0}, 5),
        (5, 9, {5: 0.0}, STAY),  # the partner is as slow
        (5, 5, {5: None}, 5),  # the partner has gone on alone: so does this replica
        (5, 6, {5: None, 6: 0.1}, 6),  # too late for that one, and somebody waits at the next
        (5, 6, {5: None, 6: 0.0}, 5),  # somebody will come to the next: a phase for it is left
        (5, 8, {5: None, 6: None, 7: None, 8: 0.0}, 7),
        (5, 8, {5: None, 6: None, 7: None, 8: None}, 8),  # suspended for long: on with what everybody works on
        (5, 8, {5: None, 6: None, 7: 1.0, 8: None}, 7),
    ],
)
def test_which_outer_step_is_joined(outer_step, furthest, waiting, expected):
    assert hurry_to(outer_step, furthest, waiting.__getitem__, 3.0) == expected
