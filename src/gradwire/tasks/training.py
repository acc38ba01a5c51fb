"""One worker's training: a plain loop, whose gradients or updates are compressed on their way to the others.

Everything random is a function of seed, epoch, step and rank (example_order.py) or in the checkpoint, so a run
that was stopped and resumed ends with the same parameters, bit for bit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.checkpoints import run_file
from gradwire.checkpoints.run_file import Checkpoint
from gradwire.errors import AggregateError, CheckpointError, GradwireError
from gradwire.tasks import backward_option as rows
from gradwire.tasks import example_order, generator_state
from gradwire.tasks.base import Task, evaluation_sums, loss_of
from gradwire.tasks.run_figures import summarize
from gradwire.tasks.settings import Settings
from gradwire.tasks.worker_sync import parallelize, spelled_out

WARM_UP = 0.05  # share of the steps in which the learning rate rises

OnStep = Callable[["Training", float], None]


class Training:
    """A model in training on this worker; `run` takes it from where it stands to the end."""

    def __init__(
        self, task: Task, settings: Settings, codec: str, saved: Checkpoint | None = None, backward: str = rows.EXACT
    ):
        self.task, self.settings, self.codec, self.backward = task, settings, codec, backward
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.steps_per_epoch = task.train_size // (settings.batch_size * self.workers)
        if not self.steps_per_epoch:
            raise GradwireError(
                f"{self.workers} workers with a batch of {settings.batch_size} each need more than the "
                f"{task.train_size} examples of {task.name}: give a smaller --batch-size"
            )
        torch.manual_seed(settings.seed)
        self.device = own_device(settings.device)
        self.model = task.build_model().to(self.device)
        self.converted = rows.convert(self.model, backward)
        self.optimizer = task.build_optimizer(self.model, settings.lr)
        self.parallel = parallelize(self.model, self.optimizer, codec, settings)
        self.handle = self.parallel.handle
        self.step = self.epoch = self.step_in_epoch = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []
        torch.manual_seed(example_order.derived_seed(settings.seed, self.rank))
        if saved:
            self._restore(saved)
        self.last_step = settings.steps or self.step + self._steps_to_epoch(settings.epochs or 0)
        if self.last_step <= self.step:
            raise GradwireError(f"the run is at step {self.step} already: give more --epochs or --steps")
        self._stats_before = self.handle.stats()

    def run(self, on_step: OnStep) -> dict[str, Any]:
        """Train to the end, and return the figures of the run, the same on every worker."""
        first_step = self.step
        with self.parallel.running():
            while self.step < self.last_step:
                on_step(self, self._train_step())
                every = self.settings.save_every
                if self.settings.save and every and self.step % every == 0:
                    self._save(Path(self.settings.save))
                if self.step_in_epoch == 0 and self.step < self.last_step:
                    self._evaluate()
            start = time.perf_counter()
        self.seconds += time.perf_counter() - start  # the last sync
        if self.settings.save:
            self._save(Path(self.settings.save))
        self._evaluate()
        return {
            "codec": self.codec,
            "spec": spelled_out(self.codec),
            "backward": self.backward,
            "backward_spec": rows.spelled_out(self.backward),
            "converted": self.converted,
            "steps": self.step,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "digest": self._common_digest(),
            "history": self.history,
            **summarize(self.step - first_step, self.seconds, self._stats_before, self.handle.stats()),
        }

    def _train_step(self) -> float:
        start = time.perf_counter()
        seed, epoch, step = self.settings.seed, self.epoch, self.step_in_epoch
        if step == 0 or not hasattr(self, "_order"):
            self._order = example_order.epoch_order(self.task.train_size, seed, epoch)
        indices = example_order.batch_indices(self._order, step, self.rank, self.workers, self.settings.batch_size)
        generator = example_order.augmentation_generator(seed, epoch, step, self.rank)
        inputs, targets = self.task.train_batch(indices, generator)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * learning_rate_factor(self.step, self.last_step)
        self.optimizer.zero_grad()
        loss = loss_of(self.parallel.forward(inputs.to(self.device)), targets.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.step_in_epoch += 1
        if self.step_in_epoch == self.steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.seconds += time.perf_counter() - start
        return loss.item()

    def _evaluate(self) -> None:
        """Every worker takes its share of the test data."""
        with self.parallel.common_parameters():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)
            sums = evaluation_sums(self.task, self.model, self.rank, self.workers)
        dist.all_reduce(sums)
        loss, right, decisions = sums.tolist()
        figures = self.task.metrics(loss / decisions, right / decisions)
        self.history.append({"epoch": self.step / self.steps_per_epoch, "step": self.step, **figures})

    def _common_digest(self) -> str:
        """The digest of the parameters, which must be the same everywhere."""
        digests: list[Any] = [None] * self.workers
        dist.all_gather_object(digests, run_file.digest(self.model))
        different = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise AggregateError(f"replicas differ: rank {', '.join(different)} has other parameters than rank 0")
        return str(digests[0])

    def _save(self, path: Path) -> None:
        """All workers' memories go to rank 0, which writes the file."""
        with self.parallel.common_parameters():
            plain, row_memory = rows.split_state(self.model)
            model = {name: tensor.clone() for name, tensor in plain.items()}
        own = (generator_state.state(self.device), self.parallel.state_dict(), row_memory)
        gathered: list[Any] | None = [None] * self.workers if self.rank == 0 else None
        dist.gather_object(own, gathered)
        if gathered:
            generators, error_memory, memories_of_rows = zip(*gathered, strict=True)
            saved = Checkpoint(
                settings=self.settings.shared(),
                step=self.step,
                epoch=self.epoch,
                step_in_epoch=self.step_in_epoch,
                model=model,
                optimizer=self.optimizer.state_dict(),
                rng=list(generators),
                error_memory=list(error_memory),
                row_memory=list(memories_of_rows),
            )
            run_file.save(path, saved)

    def _restore(self, saved: Checkpoint) -> None:
        with _explain_misfits():
            self.model.load_state_dict(saved.model)
            self.optimizer.load_state_dict(saved.optimizer)
            self.parallel.load_state_dict(saved.error_memory_for(self.rank, self.workers))
            # At last, since a state without row memories empties them.
            self.model.load_state_dict(self.model.state_dict() | saved.row_memory_for(self.rank, self.workers))
        self.step, self.epoch = saved.step, saved.epoch
        # On other workers or with another batch size, go on after the examples that were seen already.
        seen = saved.step_in_epoch * saved.settings["batch_size"] * saved.workers
        self.step_in_epoch = min(seen // (self.settings.batch_size * self.workers), self.steps_per_epoch - 1)
        if saved.workers == self.workers:
            with _explain_misfits():
                generator_state.restore(self.device, saved.rng[self.rank])
        else:
            torch.manual_seed(example_order.derived_seed(self.settings.seed, self.step, self.rank))

    def _steps_to_epoch(self, epoch: int) -> int:
        return (epoch - self.epoch) * self.steps_per_epoch - self.step_in_epoch


@contextmanager
def _explain_misfits() -> Iterator[None]:
    """Raise a CheckpointError for whatever torch says of a state that is not of this model."""
    try:
        yield
    except GradwireError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the checkpoint holds another model, or is damaged: {error}") from error


def own_device(name: str) -> torch.device:
    """The GPUs of a host are shared out among its workers."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise GradwireError("--device cuda: this PyTorch sees no GPU; leave the option out to train on the CPU")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def learning_rate_factor(step: int, last_step: int, warm_up: float = WARM_UP) -> float:
    """A short linear rise, then half a cosine down to zero."""
    rise = min(1.0, (step + 1) / (warm_up * last_step))
    return rise * 0.5 * (1 + math.cos(math.pi * step / last_step))
