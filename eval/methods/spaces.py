"""The settings of drafters that eval/fit.py searches: values by recipe path.

A path is section.key, or section.key.row.column of a matrix.
"""

from collections.abc import Mapping

from specdraft.recipes.schema import Recipe

Space = Mapping[str, tuple]

SSD_SPACE = {"drafting.gamma": (1, 2, 3, 4, 5, 6, 8), "drafting.theta_prob": (0.0, 0.2, 0.4, 0.6)}
GSD_SPACE = {
    "drafting.depth": (3, 4, 6, 8, 10),
    "drafting.out_degree": (2, 3, 4),
    "drafting.theta_prob": (0.1, 0.2, 0.4),
    "drafting.theta_sib": (0.1, 0.3, 0.5),
    "drafting.tau": (1, 2, 3),
}
LOOKUP_SPACE = {"eval.lookup_match": (1, 2, 3), "eval.lookup_copy": (2, 3, 4, 5, 7, 10)}
MAXGRAM_SPACE = {"maxgram.n": (1, 2, 3, 4, 5, 7, 10)}


def cascade_space(recipe: Recipe) -> Space:
    """K's entries from the diagonal on, whose own is never 0: every drafter has something to do.

    Fewer values of each for more students, since there are more entries, and their leniency: a
    lone student has nobody to be lenient with. Max-Gram drafts alone behind matches of some length.
    """
    if (size := recipe.cascade.size) == 1:  # the paper's k11, k12 and k21
        values = {(0, 0): (1, 2, 3, 4, 6, 8), (0, 1): (0, 1, 2, 4, 10), (1, 1): (1, 2, 4, 7, 10)}
    else:
        places = [(i, j) for i in range(size + 1) for j in range(i, size + 1)]
        values = {(i, j): (1, 2, 4) if i == j else (0, 1, 2) for i, j in places}
    space = {f"cascade.k.{i}.{j}": some for (i, j), some in values.items()}
    space["cascade.copy_match"] = (None, 1, 2, 4)
    return space if size == 1 else space | {"cascade.leniency": (1.0, 2.0, 3.0, 5.0)}
