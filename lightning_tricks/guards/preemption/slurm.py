"""Put a SLURM job back into the queue."""

import subprocess
from collections.abc import Mapping


def job_id(environment: Mapping[str, str]) -> str | None:
    """The id of the job as `scontrol` takes it, of an array's job with its number in the array; None outside SLURM."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def requeue(job: str) -> str:
    """Have SLURM run the job again, and return a line that says so, or why not."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"SLURM job {job} is not requeued ({error.strerror}): {' '.join(command)}"
    if done.returncode:
        answer = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        return f"SLURM job {job} is not requeued ({answer}): {' '.join(command)}"
    return f"SLURM job {job} is requeued"
