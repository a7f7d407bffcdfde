"""Whether the caches of a recipe are what its drafter should learn from.

    findings = check_caches(recipe, target, samples=4)

The caches that the recipe would use are looked for first. Where there are none, those that differ
from them in tokenizer, template, target or its layers alone are examined: they are what was trained
on before one of these changed, and the line that speaks of it fails.

Shapes: T tokens of a row, H hidden.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdraft.data import fingerprint
from specdraft.data.store.feature_builder import feature_settings
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.storage import MANIFEST
from specdraft.data.store.token_builder import token_settings
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.checkup.finding import Finding, failed, judged, passed, skipped
from specdraft.models.feature_layers import cache_command
from specdraft.models.target import Target
from specdraft.recipes.errors import CacheError
from specdraft.recipes.schema import Recipe

REBUILD = "rebuild both caches: accelerate launch data/cache.py RECIPE, and train again"
# What may differ between a cache and a recipe for the doctor to say that it is the recipe's.
IDENTITY = {"tokenizer", "template", "target", "weights", "config", "layers"}
SHARDS, OWNER = "shards", "target of the features"
FEATURE_LINES = (SHARDS, OWNER, "features", "scale", "shift")
MASK_ROWS = 1000  # looked at, spread over the cache
# Greedy answers of the target are its own argmax but for near-ties.
OWN_AGREEMENT = 0.9


@dataclass
class Caches:
    """What was found; None where nothing could be opened."""

    tokens: TokenCache | None = None
    features: FeatureCache | None = None


def check_caches(recipe: Recipe, target: Target, samples: int) -> tuple[Caches, list[Finding]]:
    """Examine both caches, `samples` rows of them with the live target."""
    caches, findings = Caches(), []
    identity = target.identity()
    wanted = token_settings(recipe, target.tokenizer, identity)
    folder = nearest(Path(recipe.data.cache_dir), "tokens", "meta.json", wanted)
    if folder is None:
        lines = ("tokens", "tokenizer", "template", "mask", *FEATURE_LINES)
        why = f"no token cache of this recipe in {recipe.data.cache_dir}"
        return caches, [
            skipped(line, why, "accelerate launch data/cache.py RECIPE" if not n else "")
            for n, line in enumerate(lines)
        ]
    try:
        caches.tokens = tokens = TokenCache.open(folder)
    except CacheError as error:
        findings.append(failed("tokens", str(error), f"delete {folder} and run again"))
    else:
        findings.append(passed("tokens", f"{len(tokens)} rows at {folder}"))
        made = tokens.meta["settings"]
        findings += [_same(name, made[name], wanted[name]) for name in ("tokenizer", "template")]
        findings.append(check_mask(tokens))
        findings += _check_features(recipe, target, caches, samples)
    return caches, findings


def nearest(cache_dir: Path, kind: str, book: str, wanted: dict[str, Any]) -> Path | None:
    """Return the folder of the cache with these settings, or with others in IDENTITY only.

    book: the file of a cache's folder that states its settings.
    """
    exact = cache_dir / f"{kind}-{fingerprint.of_settings(wanted)}"
    if exact.is_dir():
        return exact
    found: dict[int, Path] = {}
    for path in sorted(cache_dir.glob(f"{kind}-*/{book}")):
        try:
            settings = json.loads(path.read_bytes())["settings"]
        except (ValueError, KeyError):
            continue
        names = settings.keys() | wanted.keys()
        differing = {name for name in names if settings.get(name) != wanted.get(name)}
        if differing <= IDENTITY:
            found.setdefault(len(differing), path.parent)
    return found[min(found)] if found else None


def _same(line: str, made: str, now: str) -> Finding:
    note = f"the cache was made with {made[:12]}"
    note += "" if made == now else f", the target has {now[:12]}"
    return judged(line, made == now, note, REBUILD)


def check_mask(tokens: TokenCache) -> Finding:
    """Some tokens of every row are supervised, and not all of the cache is."""
    step = -(-len(tokens) // MASK_ROWS)
    masks = tokens.dataset.select(range(0, len(tokens), step))["loss_mask"]
    counts = [sum(mask) for mask in masks]
    share, bare = sum(counts) / sum(map(len, masks)), counts.count(0)
    note = f"{share:.0%} of the tokens of {len(counts)} rows are supervised, {bare} rows have none"
    remedy = "mark the answers in the chat template with {% generation %}; see --preview"
    return judged("mask", 0 < share < 1 and bare == 0, note, remedy)


def _check_features(recipe: Recipe, target: Target, caches: Caches, samples: int) -> list[Finding]:
    if recipe.data.features == "online":
        why = "data.features=online: the target computes features in training, none are kept"
        return [skipped(line, why) for line in FEATURE_LINES]
    made = caches.tokens.meta["settings"]
    wanted = feature_settings(recipe, caches.tokens, target)
    wanted |= {name: made[name] for name in ("tokenizer", "template")}  # judged before
    folder = nearest(Path(recipe.data.cache_dir), "features", MANIFEST, wanted)
    if folder is None:
        why = f"no feature cache of this recipe in {recipe.data.cache_dir}"
        return [skipped(line, why) for line in FEATURE_LINES]
    try:
        caches.features = cache = FeatureCache.open(folder, verify=True)
    except CacheError as error:
        problem, _, remedy = str(error).partition("; ")
        fault = failed(SHARDS, problem, remedy or "run data/cache.py again")
        rest = [line for line in FEATURE_LINES if line != SHARDS]
        return [fault, *(skipped(line, "the cache is not whole") for line in rest)]
    findings = [passed(SHARDS, f"{len(cache.manifest['shards'])} with the right checksums")]
    owner, own = cache.manifest["target"], cache.manifest["settings"]["weights"]
    note = f"made by {owner['name']} (weights {own[:12]})"
    if own != wanted["weights"]:
        note += f", the target is {target.name} (weights {wanted['weights'][:12]})"
    findings.append(judged(OWNER, own == wanted["weights"], note, REBUILD))
    if own != wanted["weights"]:
        return findings + [skipped(line, "of another target") for line in FEATURE_LINES[2:]]
    if cache.storage.layers != recipe.data.feature_layers:
        note = f"{folder} has layers {list(cache.storage.layers)} of the target, the recipe wants "
        note += str(list(recipe.data.feature_layers))
        remedy = f"add them: {cache_command(recipe.data.feature_layers)}"
        findings.append(failed("features", note, remedy))
        return findings + [skipped(line, "of other layers") for line in FEATURE_LINES[3:]]
    count = min(samples, len(cache))
    rows = [cache[n * len(cache) // count] for n in range(count)]
    return [*findings, *check_rows(recipe, target, cache, rows)]


def check_rows(
    recipe: Recipe, target: Target, cache: FeatureCache, rows: list[dict[str, Tensor]]
) -> Iterator[Finding]:
    """Compare cached rows with the live target: values, scale, place."""
    kept = [cache.storage.kept(row["loss_mask"]) for row in rows]
    layers, parts = cache.storage.layers, (cache.storage.parts, -1)
    ids = [row["input_ids"][None].to(target.device) for row in rows]
    live = [target.features(one, layers=layers)[0].cpu() for one in ids]
    # Feature and layers apart, [M, 1 + n, H]: each is judged by its own size.
    live = [x[places].unflatten(-1, parts) for x, places in zip(live, kept, strict=True)]
    cached = [
        row["features"][places].unflatten(-1, parts) for row, places in zip(rows, kept, strict=True)
    ]
    # Half of the digits: batches and kernels sum in other orders, layer after layer.
    limit = max(torch.finfo(live[0].dtype).eps, cache.storage.eps) ** 0.5
    # Where features stand is the matter of the line `shift`: here, only what they are.
    gap = min(_gap(cached, live, places) for places in (0, 1, -1))
    note = f"{len(rows)} rows computed again differ by a relative {gap:.1e} (allowed: {limit:.1e})"
    yield judged("features", gap <= limit, note, REBUILD)
    yield check_scale(cache, [features[:, 0] for features in cached])
    yield check_shift(recipe, target, rows)


def check_scale(cache: FeatureCache, cached: list[Tensor]) -> Finding:
    """The features are finite and of the scale that the manifest hands to heads."""
    values, stated = torch.cat(cached).float(), cache.manifest["feature_scale"]
    found, norm = float(values.std()), float(values.norm(dim=-1).mean())
    note = f"features have a standard deviation of {found:.3g} (manifest: {stated:.3g}), "
    note += f"a norm of {norm:.3g} on average"
    # A few rows are no census: only another order of magnitude is a fault.
    return judged("scale", stated > 0 and 0.5 < found / stated < 2, note, REBUILD)


def check_shift(recipe: Recipe, target: Target, rows: list[dict[str, Tensor]]) -> Finding:
    """Feature i predicts token i + 1, and none of its neighbours so well."""
    agreed, count = dict.fromkeys((1, 0, 2), 0), 0
    for row in rows:
        features = row["features"][:, : target.hidden_size].to(target.device, target.dtype)
        best = target.logits(features).argmax(-1).cpu()  # [T]
        supervised = row["loss_mask"][1:-1]  # token i + 1 is an answer's, and i + 2 exists
        count += int(supervised.sum())
        for ahead in agreed:
            tokens = row["input_ids"][ahead : len(best) - 2 + ahead]
            agreed[ahead] += int((best[:-2] == tokens)[supervised].sum())
    if not count:
        return skipped("shift", f"no token behind an answer's in {len(rows)} rows to compare with")
    shares = {ahead: hits / count for ahead, hits in agreed.items()}
    own = recipe.data.answers == "target" and recipe.data.samples == 1
    good = max(shares, key=shares.get) == 1 and shares[1] >= (OWN_AGREEMENT if own else 0)
    note = f"argmax of feature i is token i + 1 at {shares[1]:.0%} of {count} answer tokens "
    note += f"(token i: {shares[0]:.0%}, token i + 2: {shares[2]:.0%})"
    remedy = (
        f"the features stand at the wrong tokens, or the answers are not the target's; {REBUILD}"
    )
    return judged("shift", good, note, remedy)


def _gap(cached: list[Tensor], live: list[Tensor], places: int) -> float:
    """Largest relative difference of a token's feature, cached ones moved back by `places`."""
    gaps = []
    for ours, theirs in zip(cached, live, strict=True):
        end = len(theirs) - abs(places)
        a = ours[max(places, 0) :][:end].float()
        b = theirs[max(-places, 0) :][:end].float()
        if end > 0:  # of a row with one feature, moved, nothing is left
            gaps.append(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()))
    # max() of a list forgets NaN depending on its place in it.
    return float(torch.tensor(gaps).max()) if gaps else math.inf
