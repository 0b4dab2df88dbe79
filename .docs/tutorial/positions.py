# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tutorial: where does a word stand?
#
# Attention is a wonderful reader with one odd defect: it cannot count. It looks at all words of a text at once, and by
# itself it has no idea which came first. Everything that a transformer knows of order has to be put into it, and the
# ways to do that have names that you will have met: sinusoidal, learned, relative, rotary.
#
# We go through them in the order in which they were found, because each one fixes a defect of the one before. Nothing
# is taken on trust: every claim is computed, and every `assert` below would stop this page from being built if its
# claim were false. At the end we open a real GPT-2 and change its positions.
#
# You need Python, some linear algebra (dot products, rotations), and nothing else. It runs in a minute without a GPU
# and without a network.

# %%
# In Colab, run this first: %pip install "hf-posswap[all]"
import math
import tempfile
from pathlib import Path

import torch
from IPython.display import Image
from transformers.utils import logging

from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.plotting import draw_positions, sheet

logging.disable_progress_bar()
torch.manual_seed(0)
torch.set_grad_enabled(False)  # until the end nothing is trained
pictures = Path(tempfile.mkdtemp())
SIGNED = "RdBu_r"  # blue below 0, red above: colours that any colour vision tells apart

# %% [markdown]
# ## A reader that cannot count
#
# Two sentences of the same words. The dog would like you to tell them apart.

# %%
words = {"the": 0, "dog": 1, "chases": 2, "pig": 3}
vectors = torch.randn(4, 16, dtype=torch.float64)  # a vector for each word, [4, E]
first = vectors[[words[word] for word in "the dog chases the pig".split()]]  # [5, E]
second = vectors[[words[word] for word in "the pig chases the dog".split()]]


def attend(states):
    """Return what each word [N, E] gets: the mean of all, weighted by softmax."""
    return (states @ states.T / math.sqrt(states.shape[1])).softmax(dim=-1) @ states


difference = (attend(first)[2] - attend(second)[2]).abs().max()
print(f"what 'chases' gets in the two sentences differs by {difference:.1e}")
assert difference < 1e-12

# %% [markdown]
# Nothing. And it is worse than that: shuffle a sentence in any way, and each word gets just what it got before. The
# outputs are shuffled along with the inputs, and that is all. (Mathematicians say: attention is *equivariant* to
# permutations.)

# %%
shuffled = torch.randperm(5)
assert torch.allclose(attend(first)[shuffled], attend(first[shuffled]))
print("shuffled by", shuffled.tolist(), "- and nothing else changed")

# %% [markdown]
# So each word has to bring its place along. How do you write a place into a vector?
#
# ## First tries: a number, a fraction, binary digits
#
# *The index itself*, 0, 1, 2, ... grows without end: at word 5,000 it drowns whatever the vector said.
#
# *A fraction of the length*, 0 to 1, stays small, but then "one step to the right" is 0.1 in a text of ten words and
# 0.001 in one of a thousand. A model would have to measure every text anew.
#
# *Binary digits* stay small and mean the same in every text. And they show a pattern worth a long look: the last digit
# flips at every number, the next at every second, the next at every fourth.

# %%
numbers = torch.arange(64)
bits = torch.stack([numbers >> i & 1 for i in range(6)], dim=1).double()  # [64, 6]
flips = (bits[1:] != bits[:-1]).sum(dim=0)
print("digit i flips so often between 0 and 63:", flips.tolist())
assert flips.tolist() == [63 // 2**i for i in range(6)]

# %% [markdown]
# Each digit is a square wave, of wavelength 2, 4, 8, ... It is the sign of a sine of that wavelength:

# %%
lengths = 2 ** torch.arange(1, 7)
waves = torch.sin(2 * math.pi * (numbers[:, None] + 0.5) / lengths)  # [64, 6]
assert torch.equal(bits, (waves < 0).double())

# %% [markdown]
# But digits jump. Going from 7 to 8 flips four of them at once (0111 to 1000), going from 8 to 9 one. To a network,
# which is made of smooth functions, 7 and 8 look like strangers and 8 and 9 like twins. Here is the idea of
# *Attention Is All You Need* in one sentence: **keep the wavelengths, drop the corners.**

# %%
from hf_posswap.schemes import Sinusoidal

E = 128
table = Sinusoidal(layout="interleaved").waves(512, E)  # sin, cos, sin, ...: [512, E]


def step(rows):
    """Return how far each place [N, E] is from the next, [N - 1]."""
    return (rows[1:] - rows[:-1]).norm(dim=1)


for name, rows in (("binary", bits), ("sines", table)):
    print(f"{name:6}: steps between {step(rows).min():.6f} and {step(rows).max():.6f}")
assert step(bits).max() / step(bits).min() > 2.4
assert torch.allclose(step(table), step(table)[0])

with sheet(
    pictures / "counting.png",
    "Counting, with and without corners",
    "A row a place. Left: six binary digits. Right: 64 of 128 sines and cosines.",
    columns=2,
    height=3.4,
) as page:
    drawings = {"binary digit": bits, "dimension": table[:64, :64]}
    for panel, (name, rows) in zip(page.panels, drawings.items(), strict=True):
        image = panel.imshow(rows, cmap=SIGNED, vmin=-1, vmax=1, aspect="auto")
        page.axes(panel, name, "place")
    page.bar(image, page.panels, "value")
Image(pictures / "counting.png")

# %% [markdown]
# The left columns hurry, the right ones crawl, in both. Every step, from any place to the next, is now exactly as long
# as every other. Where do the wavelengths come from? They grow by the same factor from pair to pair, as the digits' do
# by 2: dimension 2i is sin(p / 10000^(2i/E)), and 2i + 1 its cosine.

# %%
speeds = 10000 ** (-torch.arange(0, E, 2).double() / E)  # radians a place, [E/2]
wavelengths = 2 * math.pi / speeds
ratios = wavelengths[1:] / wavelengths[:-1]
print(f"waves of {wavelengths[0]:.2f} to {wavelengths[-1]:,.0f} places")
print(f"from pair to pair: a factor of {ratios[0]:.3f}")
assert torch.allclose(ratios, ratios[0])
assert torch.allclose(table[:, 0::2], torch.sin(torch.arange(512)[:, None] * speeds))

# %% [markdown]
# ## Three gifts of the circle
#
# A sine and its cosine are a point on a circle; place p is a clock with E/2 hands. Three gifts follow, and the rest of
# the story is about keeping them.
#
# **The norm is kept.** Each hand has length 1, wherever it points: no place is louder than another.

# %%
assert torch.allclose(table.square().sum(dim=1), torch.full((512,), E / 2).double())

# %% [markdown]
# **An offset is a linear map.** Going k places on turns each hand by a fixed angle, wherever it pointed before. Turning
# is linear, so there must be one matrix that takes every place p to p + k. We shall not construct it. We let least
# squares *find* it from the even places, and try it on the odd ones, which it has never seen.

# %%
k = 7
here, there = table[:-k], table[k:]
found = torch.linalg.lstsq(here[::2], there[::2], driver="gelsd").solution  # [E, E]
error = (here[1::2] @ found - there[1::2]).abs().max()
print(f"'{k} places on', found on even places, is off by {error:.1e} on odd ones")
assert error < 1e-6


def turning(k):
    """Return the matrix [E, E] that turns hand i by k times its speed."""
    cos, sin = torch.cos(k * speeds), torch.sin(k * speeds)
    blocks = torch.stack([cos, -sin, sin, cos], dim=-1).view(-1, 2, 2)
    return torch.block_diag(*blocks)


assert torch.allclose(here @ turning(k), there)  # and this is the one, by hand

# %% [markdown]
# The same `turning(k)` serves every place, and turning by 3 and then by 4 is turning by 7. A head that wants to look
# "seven back" needs to learn one matrix, not one for each place.

# %%
assert torch.allclose(turning(3) @ turning(4), turning(7))

# %% [markdown]
# **The product of two places depends on their distance alone**, and it falls as they part: sin a sin b + cos a cos b
# is cos(a - b), for each hand.

# %%
product = table @ table.T  # [512, 512]
for distance in (0, 1, 10, 100):
    along = product.diagonal(distance)
    print(f"distance {distance:3}: {along.min():.4f} to {along.max():.4f}")
    assert along.max() - along.min() < 1e-10
    assert torch.allclose(along[0], torch.cos(distance * speeds).sum())
means = [product[0, 2**octave : 2 ** (octave + 1)].mean() for octave in range(9)]
assert means == sorted(means, reverse=True)  # octave by octave it decays

with sheet(
    pictures / "likeness.png",
    "How alike two places are",
    "The product of each two rows; and, on the right, by their distance.",
    columns=2,
    height=3.0,
) as page:
    image = page.panels[0].imshow(product / product[0, 0], cmap=SIGNED, vmin=-1, vmax=1)
    page.axes(page.panels[0], "place", "place")
    page.bar(image, page.panels[0], "cosine")
    page.ruled(page.panels[1])
    page.panels[1].plot(product[0] / product[0, 0], color=page.line(2)["color"])
    page.axes(page.panels[1], "distance", "cosine")
Image(pictures / "likeness.png")

# %% [markdown]
# ## A table of your own
#
# BERT and GPT-2 went a simpler way: give each place a vector of its own and let training find it. It finds something.
# This is a small GPT-2 that comes with the package; it has read five million tokens of Python, in windows of 128.

# %%
import hf_posswap

SHIPPED = Path(hf_posswap.__file__).parent / "quickstart" / "model"
gpt2 = hf_posswap.load(SHIPPED).eval()
learned = gpt2.transformer.wpe.weight.detach()  # [128, 128]
unit = learned / learned.norm(dim=1, keepdim=True)
likeness = unit @ unit.T
near, far = likeness.diagonal(1).mean(), likeness.diagonal(64).mean()
print(f"cosine of neighbours {near:.2f}, of places 64 apart {far:.2f}")
assert near > 0.7 > 0.0 > far  # nobody told it that neighbours are alike

shape = hf_posswap.describe_positions(gpt2).geometry
like = {"pictures": ["similarity"], "geometry": shape, "old": learned, "factor": 1}
drawn = draw_positions(["sinusoidal"], pictures, **like)
Image(drawn[0].path)

# %% [markdown]
# On the left is what training made, on the right what Vaswani and colleagues wrote down. But a table of one's own has
# an end. This one has 128 rows, and there is no row 128:

# %%
try:
    gpt2(torch.zeros(1, 129, dtype=torch.long))
    ended = False
except Exception as problem:
    ended = True
    print(f"{type(problem).__name__}: {problem}")
assert ended

# %% [markdown]
# ## What adding does to the product
#
# Both kinds of table are *added* to the words. Attention then multiplies (x + p) with (y + r), and out come four terms:
#
#     (x + p) W (y + r)  =  x W y  +  x W r  +  p W y  +  p W r
#
# words with words, words with places, places with words, places with places. The last one is what we wanted. With the
# matrix W between them, which the model learned for other reasons, even that no longer depends on distance alone:

# %%
W = torch.randn(E, E, dtype=torch.float64) / math.sqrt(E)
mixed = table @ W @ table.T
spread = mixed.diagonal(10).std() / mixed.std()
print(f"at distance 10 the product varies {spread:.0%} as much as over all pairs")
assert spread > 0.5
assert product.diagonal(10).std() < 1e-10  # it did not, before W

# %% [markdown]
# So the second gift survives addition (a linear map stays one), but the third is lost as soon as the model mixes
# dimensions. Two ways out were found. One says: *if only distance should count, put the distance into the score.* The
# other: *do not add. Turn.*
#
# ## Relative: write the distance into the score
#
# T5 learns a number for each distance and head, and adds it to the score. ALiBi does without learning: it subtracts the
# distance, times a slope of each head. Some heads are short-sighted, some look far.

# %%
from hf_posswap.schemes import Alibi

alibi = Alibi().resolve(shape, None).mechanism(shape)  # for our GPT-2's four heads
places = torch.arange(64)
bias = alibi.bias(places[None], places[None])[0]  # [H, Q, K]
slopes = [2 ** (-8 * (head + 1) / 4) for head in range(4)]
print("slopes of the four heads:", slopes)
for head, slope in enumerate(slopes):
    for distance in range(64):
        along = bias[head].diagonal(-distance)  # each query with the key so far back
        assert torch.allclose(along, torch.tensor(-slope * distance))
drawn = draw_positions(["alibi"], pictures, pictures=["bias"], geometry=shape, factor=1)
Image(drawn[0].path)

# %% [markdown]
# There is no table, and so no end. The price: ALiBi can say "farther is less", and nothing finer.
#
# ## Rotary: turn the words themselves
#
# Go back to the clock. Adding place p put a clock *next to* the word. RoPE takes the word's own dimensions, two by two,
# as hands, and turns them: pair i of a query at place m by the angle m theta_i, and of a key at n by n theta_i.

# %%
D = 64
theta = 10000 ** (-torch.arange(0, D, 2).double() / D)  # radians a token, [D/2]


def turn(x, place):
    """Return x [..., D] at `place` [...]: each pair turned by place * theta."""
    angle = torch.as_tensor(place)[..., None] * theta
    cos, sin = angle.cos(), angle.sin()
    one, other = x[..., 0::2], x[..., 1::2]
    turned = (one * cos - other * sin, one * sin + other * cos)
    return torch.stack(turned, dim=-1).flatten(-2)


q, key = torch.randn(2, D, dtype=torch.float64)
everywhere = turn(q, torch.arange(1000)).norm(dim=1)
print(f"the length of q: {q.norm():.4f}")
print(f"at 1,000 places: {everywhere.min():.4f} to {everywhere.max():.4f}")
assert torch.allclose(everywhere, q.norm())  # the first gift

# %% [markdown]
# If you like complex numbers: a pair (a, b) is a + ib, and turning is multiplying by e^(i m theta). One line.

# %%
numbers = torch.view_as_complex(q.view(-1, 2))  # [D/2]
turned = torch.view_as_real(numbers * torch.exp(1j * 7 * theta)).flatten()
assert torch.allclose(turned, turn(q, 7))

# %% [markdown]
# Now the third gift, and this time no matrix can take it away, because turning comes *after* W made q and k:
# **q times k depends on the distance alone.** Also at places that no one has ever trained on.

# %%
for m, n in ((5, 2), (105, 102), (1_000_005, 1_000_002), (2, 5)):
    print(f"q at {m:>9,}, k at {n:>9,}: {turn(q, m) @ turn(key, n):+.6f}")
near, far = turn(q, 5) @ turn(key, 2), turn(q, 1_000_005) @ turn(key, 1_000_002)
assert torch.allclose(near, far, atol=1e-6)
assert not torch.allclose(near, turn(q, 2) @ turn(key, 5))  # 3 ahead is not 3 back

# %% [markdown]
# It is not a trick of ours: what we wrote by hand is what this package runs inside a model, and what transformers runs
# inside Llama, but for the order in which dimensions are paired (Llama pairs i with i + D/2).

# %%
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_posswap.rope_math import Frequencies, cos_sin, rotate

at = torch.arange(20)
by_hand = turn(q, at).float()  # [20, D]
rows = q.float().expand(1, 1, 20, D)  # as models have them: [B, H, N, D]
turns = cos_sin(at[None], Frequencies(theta.float()))
assert torch.allclose(rotate(rows, turns, "interleaved")[0, 0], by_hand, atol=1e-5)

halves = torch.arange(D).view(-1, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
angles = (at[:, None] * theta).float().repeat(1, 2)[None]
llama, _ = apply_rotary_pos_emb(rows[..., halves], rows, angles.cos(), angles.sin())
assert torch.allclose(llama[0, 0], by_hand[:, halves], atol=1e-5)

# %% [markdown]
# **Decay.** With alike queries and keys the product is the sum of cos(d theta_i), which wanders down as the hands fall
# out of step. The paper (section 3.4.3) bounds it: with S_j the sum of the first j turning hands, the
# product is at most a constant times the mean of |S_j|, and that falls. We draw both.

# %%
distances = torch.arange(257)
angles = distances[:, None] * theta  # [257, D/2]
score = angles.cos().sum(dim=1)
bound = torch.exp(1j * angles).cumsum(dim=1).abs().mean(dim=1)  # the mean of |S_j|
octaves = [bound[2**octave : 2 ** (octave + 1)].mean() for octave in range(8)]
print("the mean of |S_j|, octave by octave:", [round(float(one), 1) for one in octaves])
assert octaves == sorted(octaves, reverse=True)

# Abel's summation, with h_j the product of q and k in pair j, and none after the last:
# |sum_j h_j e^(i d theta_j)| <= max |h_(j+1) - h_j| * sum_j |S_j|
h = numbers * torch.view_as_complex(key.view(-1, 2)).conj()  # [D/2]
constant = torch.diff(h, append=torch.zeros(1)).abs().max() * D / 2
exact = turn(q, distances) @ turn(key, torch.tensor(0))  # [257]
assert bool((exact.abs() <= constant * bound).all())

with sheet(
    pictures / "decay.png",
    "What distance does to the product",
    "Alike query and key; and the mean of |S_j|, which bounds it but for a constant.",
    height=2.8,
) as page:
    panel = page.panels[0]
    page.ruled(panel)
    lines = {"q k": score / score[0], "mean of |S_j|": bound / bound[0]}
    for number, (name, line) in enumerate(lines.items()):
        panel.plot(distances, line, color=page.line(number + 2)["color"], label=name)
    page.axes(panel, "distance, tokens", "of what it is at 0")
    page.legend(panel)
Image(pictures / "decay.png")

# %% [markdown]
# ## Nothing moves when a text grows
#
# A model that writes keeps the keys of all words that it has read: the *cache*. That pays only if a key, once made,
# stays right when words are appended. Under RoPE it does: a key is turned by its own place, and its place never
# changes. We put RoPE into our GPT-2 and look into its cache.

# %%
swapped = hf_posswap.load(SHIPPED).eval()
hf_posswap.patch_model(swapped, "rope", max_length=1024)
text = torch.randint(1024, (1, 60))
short = cache_in(swapped(text[:, :40], use_cache=True))
whole = swapped(text, use_cache=True)
layers = zip(cache_in(whole).layers, short.layers, strict=True)
for number, (long, kept) in enumerate(layers):
    moved = (long.keys[:, :, :40] - kept.keys).abs().max()  # [B, H, 40, D]
    print(f"layer {number}: 20 words more have moved its 40 keys by {moved:.0e}")
    assert moved < 1e-5  # rounding

# the argument is named `cache`; before transformers 5.24, `past_key_values`
from_cache = {cache_argument(swapped): short}
goes_on = swapped(text[:, 40:], **from_cache).logits
assert torch.allclose(goes_on, whole.logits[:, 40:], atol=1e-4)

# %% [markdown]
# Compare the fraction of the length from the beginning: there, every appended word moves all others.

# %%
assert bool((torch.arange(1, 40) / 40 != torch.arange(1, 40) / 60).all())

# %% [markdown]
# ## Turning where no score is ever written down
#
# Softmax attention writes a score for each pair of words, N times N. *Linear attention* avoids that: it replaces
# exp(q k) by a product of features, phi(q) phi(k), and then the sums over keys can be kept as a running state. ALiBi
# and T5 have nothing to hold on to here: they change scores, and there are none. A rotation does: it acts on q and k.
#
# The features are Performer's: random directions w, and phi(x) = exp(w x - |x|^2 / 2), all positive. On average over
# the directions, phi(q) phi(k) *is* exp(q k):


# %%
def features(x, directions):
    """Return Performer's positive features [N, M] of x [N, D]."""
    half_square = x.square().sum(dim=1, keepdim=True) / 2
    return (x @ directions.T - half_square).exp() / math.sqrt(len(directions))


N = 200
queries, keys = torch.randn(2, N, 16, dtype=torch.float64) / 4
kernel = (queries @ keys.T).exp()
errors = []
for M in (64, 1024, 16384):
    directions = torch.randn(M, 16, dtype=torch.float64)
    estimate = features(queries, directions) @ features(keys, directions).T
    errors.append(float((estimate / kernel - 1).square().mean().sqrt()))
    print(f"{M:6} directions: {errors[-1]:.1%} off")
assert errors[0] > 2 * errors[1] > 4 * errors[2]  # 16 times as many: about a quarter

# %% [markdown]
# RoFormer (section 3.3) turns the *features*, and in the numerator alone:
#
#              sum over n <= m of  [turn(phi(q_m), m) turn(phi(k_n), n)]  v_n
#     out_m =  --------------------------------------------------------------
#              sum over n <= m of  phi(q_m) phi(k_n)
#
# The denominator stays unturned, so it stays positive: nothing is ever divided by zero. (The price, which the paper
# names: the weights of the values no longer add up to 1.) First as written, with all pairs on paper. Then as it is run:
# a state that each word adds to and reads from, and that does not grow with the text.

# %%
M = D  # as many features as `turn` has dimensions
directions = torch.randn(M, 16, dtype=torch.float64)
phi_q, phi_k = features(queries, directions), features(keys, directions)  # [N, M]
values = torch.randn(N, 8, dtype=torch.float64)
below = (phi_q @ phi_k.T).tril().sum(dim=1, keepdim=True)  # the denominators, [N, 1]


def weights(start=0):
    """Return the weight of each value for each word [N, N], from `start` on."""
    at = start + torch.arange(N)
    scores = turn(phi_q, at) @ turn(phi_k, at).T
    return scores.tril() / below  # no word sees what comes after it


def as_it_runs(length=N):
    """Return the outputs, word by word: a state of M x 8 numbers, and one of M."""
    state, total, out = torch.zeros(M, 8).double(), torch.zeros(M).double(), []
    for m in range(length):
        here = torch.tensor(m)
        state += turn(phi_k[m], here)[:, None] * values[m]
        total += phi_k[m]
        out.append(turn(phi_q[m], here) @ state / (phi_q[m] @ total))
    return torch.stack(out)


print(f"scores on paper: {N * N:,}; in the state: {M * 8 + M:,}, however long the text")
assert torch.allclose(weights() @ values, as_it_runs())
assert torch.allclose(weights(), weights(start=10_000))  # distance alone, here too
assert torch.equal(as_it_runs(120), as_it_runs()[:120])  # causal: the past stays
unturned = (phi_q @ phi_k.T).tril() / below
assert not torch.allclose(weights(), unturned, atol=1e-2)  # places do matter
assert bool((below > 0).all())
print(f"the weights of a word add up to {weights().sum(dim=1).min():.2f} or more")
print(f"unturned, they add up to {unturned.sum(dim=1).min():.2f}")

# %% [markdown]
# ## A real model
#
# Enough paper. Our GPT-2 has a learned table of 128 rows; we want it to read 1,000 words. A swap is planned before
# anything is touched, and checked afterwards:

# %%
model = hf_posswap.load(SHIPPED).eval()
hf_posswap.plan_swap(model, "rope", max_length=1024)

# %%
from transformers import AutoTokenizer

from hf_posswap.comparison import read_documents

tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
texts = read_documents(None, tokenizer, length=512, limit=16)  # it has not read them
held_out = torch.from_numpy(texts.tokens).long()  # [16, 512]


def next_token_loss(model, ids):
    """Return the mean loss of the next token, in nats, on `ids` [B, N]."""
    logits = model(ids).logits[:, :-1]  # [B, N - 1, V]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model, length):
    """Return the loss on the first `length` tokens of 16 texts, in nats a token."""
    return float(next_token_loss(model, held_out[:, :length]))


before = loss_of(model, 128)
untouched = model(held_out[:1, :128]).logits
hf_posswap.patch_model(model, "rope", max_length=1024)
hf_posswap.verify_swap(model)  # raises if the mechanism did not change as planned
after = loss_of(model, 128)
print(f"loss at 128 tokens: {before:.2f} before the swap, {after:.2f} after it")
print("1,000 tokens:", tuple(model(torch.randint(1024, (1, 1000))).logits.shape))
assert after > before + 0.3

# %% [markdown]
# It reads 1,000 words now, and badly. No wonder: its weights were trained to find places in the *sum*, and the sum has
# none any more. What it pays attention to shows it. ALiBi, drawn next to RoPE, is gentler: it changes nothing but
# how far a head looks.

# %%
from hf_posswap.comparison import Candidate, compare_attention

hf_posswap.unpatch_model(model)
assert torch.equal(model(held_out[:1, :128]).logits, untouched)  # bit for bit

candidates = [
    Candidate(model, name="learned"),
    Candidate(model, "rope", name="rope"),
    Candidate(model, "alibi", name="alibi"),
]
paid = compare_attention(candidates, pictures, text="python", tokenizer=tokenizer)
print(*paid.said, sep="\n")
half = {name: found[128].half for name, found in paid.paid.items()}
assert half["rope"] > 1.5 * half["learned"] > half["alibi"]
Image(paid.path)

# %% [markdown]
# So a swap is a beginning: what it takes is a little training, far less than the model's first. Here are forty steps,
# a few seconds, with nothing special about them.

# %%
from hf_posswap.text.stdlib import python_corpus

torch.set_grad_enabled(True)
torch.manual_seed(0)
hf_posswap.patch_model(model, "rope", max_length=1024)
source = "\n".join(document.text for document in python_corpus().train[:150])
ids = torch.tensor(tokenizer(source, verbose=False)["input_ids"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=40)
for number in range(40):
    starts = torch.randint(len(ids) - 256, (8,))
    batch = torch.stack([ids[start : start + 256] for start in starts])
    loss = next_token_loss(model.train(), batch)
    loss.backward()
    optimizer.step()
    decay.step()
    optimizer.zero_grad()
    if number % 13 == 0:
        print(f"step {number:2}: {loss.item():.2f} nats a token")
model.eval()
torch.set_grad_enabled(False)
trained, far = loss_of(model, 128), loss_of(model, 512)
print(f"at 128 tokens: {before:.2f} with its table, {after:.2f} just swapped")
print(f"now {trained:.2f}; at 512 tokens {far:.2f} nats/token")
assert trained < (before + after) / 2  # more than half of the way back
assert far < after  # and farther than its table ever reached

# %% [markdown]
# And the attention has come back with it:

# %%
candidates = [
    Candidate(hf_posswap.load(SHIPPED).eval(), name="learned"),
    Candidate(model, name="rope, trained"),
]
paid = compare_attention(candidates, pictures, text="python", tokenizer=tokenizer)
print(*paid.said, sep="\n")
assert paid.paid["rope, trained"][128].half < 1.5 * half["learned"] < half["rope"]
Image(paid.path)

# %% [markdown]
# ## Where to go on
#
# - `posswap quickstart` does this properly: 200 steps by a recipe, a control that gets the same training without a
#   swap, and a table with intervals. After those 200 steps RoPE is below the control
#   ([what it finds](../../recipes/studies/results/quickstart.md)).
# - [Positions by hand](../pages/numbers.md) has the same ideas as small numbers to follow with a pencil.
# - [Schemes](../pages/schemes.md) has the formula, the source and a picture of each, and
#   [Choosing](../pages/choosing.md) says which one is for you.
#
# Sources: Vaswani and others 2017, *Attention Is All You Need*, https://arxiv.org/abs/1706.03762; Raffel and others
# 2019 (T5), https://arxiv.org/abs/1910.10683; Choromanski and others 2020, *Rethinking Attention with Performers*,
# https://arxiv.org/abs/2009.14794; Su and others 2021, *RoFormer*, https://arxiv.org/abs/2104.09864; Press and others
# 2021 (ALiBi), https://arxiv.org/abs/2108.12409.
