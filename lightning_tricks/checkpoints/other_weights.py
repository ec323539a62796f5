"""One line for a checkpoint of another model: the first key or shape that differs."""

import re
from typing import Any


def other_weights(said: str, path: Any = None) -> str | None:
    """The line for the message of a `load_state_dict` that found other names or shapes; None for any other message.

    Args:
        said: the message.
        path: value of `ckpt_path`, if known.
    """
    said = re.sub(r"\s+", " ", said).strip()
    module = re.match(r"Error\(s\) in loading state_dict for (\w+)", said)
    if not module:
        return None
    found = []
    for what, kind in (("lacks", "Missing"), ("has besides", "Unexpected")):
        if names := re.search(rf"{kind} key\(s\) in state_dict: (.*?)\. ", f"{said} "):
            first, *more = names[1].split(", ")
            found.append(f"{what} {first}" + (f" and {len(more)} more" if more else ""))
    if shapes := re.search(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)", said):
        found.append(f"has {shapes[1]} of shape {shapes[2]} in place of {shapes[3]}")
    return (
        f"ckpt_path{f'={path}' if path else ''}: the checkpoint is of another model than the recipe's {module[1]}: it "
        f"{', '.join(found) or 'differs'}; give the recipe that wrote it, or another checkpoint"
    )
