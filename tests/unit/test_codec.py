"""The modulo code against a reference written from its formula in float64, one number at a time."""

import math

import numpy as np
import pytest
import torch

from noloco_mega.comm import codec

BITS = range(2, 9)


def reference(x, y, steps, u, bits):
    """What y's owner reads of x, without mending, the codes and q div M: plain Python on blocks of 128."""
    size, read, codes, high = 2**bits, [], [], []
    for i, (mine, own) in enumerate(zip(x, y, strict=True)):
        s, dither = steps[i // codec.BLOCK], u[i]
        q = round(mine / s + dither)
        codes.append(q % size)
        high.append(q // size)
        nearest = codes[-1] + size * round((own / s + dither - codes[-1]) / size)
        read.append((nearest - dither) * s)
    return read, codes, high


def draw(elements, seed=0, scale=0.01):
    """x of size 1, and y that differs from it by `scale` times a Laplace distribution of rms 1."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(elements)
    y = x + scale / math.sqrt(2) * random.laplace(size=elements)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def message(x, half_range, bits, key=7):
    u = codec.dither(key, len(x), x.device)
    wanted = torch.full((codec.blocks_of(len(x)),), 2 * half_range / 2**bits)
    return (*codec.encode(x, wanted, u, bits), u)


def steps_of(heads):
    """The upper 7 of 16 bits are the step's number less 64."""
    return [codec.STEPS[(head >> 9) + 64] for head in heads.tolist()]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("elements", [1, 127, 128, 1000])
def test_messages_say_what_the_formula_says(bits, elements):
    step = 2.0**-7
    # x lies within ±1, and no x/s + u where fp32 and float64 could round to different sides.
    random, u = np.random.default_rng(0), codec.dither(7, elements, torch.device("cpu"))[:elements].double().numpy()
    q = random.integers(-127, 127, elements)
    x = torch.tensor((q - u + random.uniform(-0.49, 0.49, elements)) * step, dtype=torch.float32)
    y = x + torch.tensor(random.uniform(-1, 1, elements) * (2**bits / 2 - 0.6) * step, dtype=torch.float32)
    heads, packed, u = message(x, 2**bits / 2 * step, bits)
    steps = steps_of(heads)
    assert set(steps) == {step}
    assert heads.shape == (codec.blocks_of(elements),) and packed.numel() == codec.code_bytes(elements, bits)
    read, codes, high = reference(x.tolist(), y.tolist(), steps, u.tolist(), bits)
    assert codec.unpack(packed, bits)[:elements].tolist() == codes
    for block, head in enumerate(heads.tolist()):
        inside = high[block * 128 : block * 128 + 128]
        # What fills the last block is 0 and so are its q, but for the dither, which is below ½.
        assert head & 511 == sum(number * each for number, each in enumerate(inside, 1)) % 257
    found = codec.decode(heads, packed, y, u, bits)
    assert not found.wrapped.any() and found.x.shape == y.shape
    torch.testing.assert_close(found.x.double(), torch.tensor(read, dtype=torch.float64), rtol=0, atol=2e-6)
    left, _ = codec.rounding(heads, x, u)
    torch.testing.assert_close(x - left, found.x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_packed_comes_out_again(bits):
    codes = torch.randint(2**bits, (8 * 99,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = codec.pack(codes, bits)
    assert packed.numel() == 99 * bits and torch.equal(codec.unpack(packed, bits), codes)
    words = len(codes) // (8 // math.gcd(bits, 8))
    for number in (0, 1, words - 1):
        word = sum(code << bits * place for place, code in enumerate(codes[number::words].tolist()))
        size = bits // math.gcd(bits, 8)
        assert bytes(packed[number * size : (number + 1) * size].tolist()) == word.to_bytes(size, "little")


def test_the_error_is_uniform_without_bias_and_independent_of_x():
    """The same x under many dithers: mean 0 and variance s²/12 at every place, whatever lies there."""
    step, draws = 2.0**-5, 4000
    x = torch.linspace(-0.3, 0.3, 256).repeat(draws)
    heads, packed, u = message(x, 8 * step, 4)
    assert set(steps_of(heads)) == {step}
    errors = (codec.decode(heads, packed, x, u, 4).x.double() - x.double()).view(draws, 256)
    assert errors.abs().max() <= step / 2 * (1 + 1e-5)
    standard = step / math.sqrt(12)
    assert (errors.mean(0).abs() - step / 512).max() < 4.5 * standard / math.sqrt(draws)  # 256 normal deviates
    assert errors.square().mean().sqrt() == pytest.approx(standard, rel=5e-3)
    assert (errors.square().mean(0) / standard**2 - 1).abs().max() < 0.08
    assert codec.noise(torch.full((2,), step), 256) == pytest.approx(256 * step**2 / 12)
    assert codec.noise(torch.full((2,), step), 200) == pytest.approx(200 * step**2 / 12)


@pytest.mark.parametrize(
    "half_range, elements", [(5.0, 1 << 18), (7.0, 1 << 20), pytest.param(10.0, 1 << 24, marks=pytest.mark.slow)]
)
def test_weights_wrap_as_often_as_designed(half_range, elements):
    """Differences with tails as training shows them (Laplace): 8.5e-4 beyond 5 rms, 7e-7 beyond 10. What has wrapped is
    told by the sums; what is then read is right, or known to be unreadable."""
    step = 2.0**-7
    # P(|d + e| > r) for Laplace's d of rms 1 and the rounding error e, uniform in ±r/16: its tail is exp(−√2·r).
    edge = math.sqrt(2) * half_range / 16
    designed = elements * math.exp(-math.sqrt(2) * half_range) * math.sinh(edge) / edge
    x, y = draw(elements, scale=8 * step / half_range)
    heads, packed, u = message(x, 8 * step, 4)
    assert set(steps_of(heads)) == {step}
    found = codec.decode(heads, packed, y, u, 4)
    meant = x - codec.rounding(heads, x, u)[0]
    wrapped = int(((meant - y).abs() > 8 * step).sum())
    assert abs(wrapped - designed) < 3.5 * math.sqrt(designed)  # Poisson
    assert codec.wrap_rate(int(found.wrapped.sum()), len(heads)) * elements == pytest.approx(wrapped, rel=0.1)
    distance = (meant - y).abs().view(-1, 128) / step
    mendable = ((distance > 8).sum(1) <= 1) & (distance.amax(1) < 12)
    wrong = ((found.x - meant).abs() > step / 2).view(-1, 128).any(1)
    assert not wrong[mendable].any() and not found.unreadable[mendable].any()
    assert found.wrapped[~mendable].all() and (half_range > 5 or (~mendable).sum() > 10)
    assert (wrong & ~found.unreadable).sum() <= 0.02 * (~mendable).sum() + 1


def test_one_weight_that_has_wrapped_is_mended_and_two_are_noticed():
    """Each place of a block in turn, beyond either end of the range; far beyond it what is found can't be true."""
    x, _ = draw(128 * 128)
    heads, packed, u = message(x, 0.02, 4)
    step = steps_of(heads)[0]
    for beyond, readable in ((8.6, True), (11.4, True), (12.6, False), (15.0, False), (17.0, False), (25.0, False)):
        y = x.clone()
        for block in range(128):
            y[block * 128 + block] += (1 if block % 2 else -1) * beyond * step
        found = codec.decode(heads, packed, y, u, 4)
        assert found.wrapped.all() and bool(found.unreadable.any()) != readable and found.unreadable.all() != readable
        assert not readable or (found.x - x).abs().max() <= 0.51 * step
    y = x.clone()
    for block in range(128):
        y[block * 128 + block] += 9.1 * step
        y[block * 128 + (block + 17) % 128] -= 9.1 * step
    found = codec.decode(heads, packed, y, u, 4)
    assert found.wrapped.all() and found.unreadable.all()
    assert (found.x - y).abs().max() <= 8.01 * step and (found.x - x).abs().max() > 15 * step
    rates = [codec.wrap_rate(count, 128) for count in (0, 1, 20, 127, 128)]
    assert rates[0] == 0 and sorted(rates) == rates and len(set(rates)) == 5


def test_however_far_the_partner_is_what_is_read_lies_near_the_own_tensor():
    x, _ = draw(640)
    y = x + 3.0
    heads, packed, u = message(x, 0.02, 4)
    found = codec.decode(heads, packed, y, u, 4)
    assert (found.x - y).abs().max() <= 2 * 8.01 * max(steps_of(heads)) and found.wrapped.all()


def test_values_that_are_not_finite_are_read_as_such():
    x, y = draw(384, scale=1e-3)
    x[140], x[300] = math.nan, math.inf
    heads, packed, u = message(x, 0.02, 4)
    found = codec.decode(heads, packed, y, u, 4)
    assert found.x[:128].isfinite().all() and found.x[128:].isnan().all() and not found.wrapped.any()


def test_a_receiver_whose_own_values_are_not_finite_reads_none():
    x, y = draw(384, scale=1e-3)
    heads, packed, u = message(x, 0.02, 4)
    y[140], y[300] = math.nan, math.inf
    found = codec.decode(heads, packed, y, u, 4)
    assert not found.x[140].isfinite() and not found.x[300].isfinite() and found.x[:128].isfinite().all()


def test_steps_have_limits():
    """Nothing to tell, and ranges beyond the table: the nearest step that there is; never finer than fp32 can count."""
    u = codec.dither(1, 128, torch.device("cpu"))
    for value, wanted, number in ((0.0, 0.0, 0), (1.0, 1e9, 126), (0.0, 1.0, 104)):
        heads, _ = codec.encode(torch.full((128,), value), torch.tensor([wanted]), u, 4)
        assert (heads.item() >> 9) + 64 == number
    heads, _ = codec.encode(torch.full((128,), 4.0), torch.tensor([0.0]), u, 4)
    assert steps_of(heads) == [4.0 * codec.FINEST]
    assert sorted(codec.STEPS) == codec.STEPS and len(codec.STEPS) == codec.NOT_FINITE


def test_dither_is_uniform_and_everybodys():
    u = codec.dither(5, 1 << 16, torch.device("cpu"))
    assert torch.equal(u, codec.dither(5, 1 << 16, torch.device("cpu"))) and not torch.equal(
        u, codec.dither(6, 1 << 16, torch.device("cpu"))
    )
    values, counts = np.unique(u.numpy(), return_counts=True)
    np.testing.assert_array_equal(values, (np.arange(256) + 0.5) / 256 - 0.5)
    chi_square = ((counts - 256) ** 2 / 256).sum()
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_the_mean_square_of_the_last_block_is_over_what_it_has():
    values = torch.arange(1.0, 135.0)
    squares = values.double().square()
    expected = torch.stack([squares[:128].mean(), squares[128:].mean()])
    torch.testing.assert_close(codec.mean_squares(values).double(), expected)
