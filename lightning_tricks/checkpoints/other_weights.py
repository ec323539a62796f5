"""Turn torch's long error for a checkpoint of another model into one line: the first key or shape that differs."""

import re
from typing import Any


def other_weights(message: str, path: Any = None) -> str | None:
    """The line for the error of a `load_state_dict` that found other names or shapes; None for any other error.

    Args:
        message: the error's message.
        path: value of `ckpt_path`, if known.
    """
    message = re.sub(r"\s+", " ", message).strip()
    module = re.match(r"Error\(s\) in loading state_dict for (\w+)", message)
    if not module:
        return None
    found = []
    for what, kind in (("lacks", "Missing"), ("has besides", "Unexpected")):
        if names := re.search(rf"{kind} key\(s\) in state_dict: (.*?)\. ", f"{message} "):
            first, *more = names[1].split(", ")
            found.append(f"{what} {first}" + (f" and {len(more)} more" if more else ""))
    if shapes := re.search(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)", message):
        found.append(f"has {shapes[1]} of shape {shapes[2]} in place of {shapes[3]}")
    return (
        f"ckpt_path{f'={path}' if path else ''}: the checkpoint is of another model than the recipe's {module[1]}: it "
        f"{', '.join(found) or 'differs'}; give the recipe that wrote it, or another checkpoint"
    )
