"""What a reader sees in a picture: its texts, where they stand, and what covers what."""

from itertools import combinations

from matplotlib.text import Text


def all_axes(picture):
    """Every axes of every row."""
    return picture.axes


def axes_titled(picture, title):
    """The axes of a panel: the one with its title, and those of further workloads to its right."""
    every = all_axes(picture)
    first = next(place for place, axes in enumerate(every) if axes.get_title(loc="left").startswith(title))
    rest = every[first + 1 :]
    more = next((place for place, axes in enumerate(rest) if axes.get_title(loc="left")), len(rest))
    return [every[first], *rest[:more]]


def titles(picture):
    """The titles of the panels, in order."""
    return [title for axes in all_axes(picture) if (title := axes.get_title(loc="left").strip())]


def texts(picture):
    """All visible texts with their boxes; numbers of ticks outside the limits are not drawn."""
    picture.draw_without_rendering()
    hidden = set()
    for axes in all_axes(picture):
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                hidden |= {id(tick.label2)} | ({id(tick.label1)} if not low - 1e-9 <= tick.get_loc() <= high + 1e-9 else set())
    drawn = picture.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible() and artist.get_text().strip())
    return [(text.get_text(), text.get_window_extent()) for text in drawn if id(text) not in hidden]


def words(picture):
    """All visible texts."""
    return [text for text, _ in texts(picture)]


def misplaced(picture):
    """Texts that leave the picture, and pairs of texts that cover each other by more than a pixel or two."""
    edge, drawn = picture.bbox, texts(picture)
    outside = [
        text
        for text, box in drawn
        if box.x0 < edge.x0 - 1 or box.x1 > edge.x1 + 1 or box.y0 < edge.y0 - 1 or box.y1 > edge.y1 + 1
    ]
    return outside + [
        (one, other)
        for (one, box), (other, second) in combinations(drawn, 2)
        if min(box.x1, second.x1) - max(box.x0, second.x0) > 1
        and min(box.y1, second.y1) - max(box.y0, second.y0) > 2
        and not (one.endswith("\n") or other.endswith("\n"))  # the empty lines where names of workloads stand
    ]
