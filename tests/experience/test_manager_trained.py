"""Train counts are kept as long as they can matter, and no longer."""

import random

from experience_toys import episode
from manager_toys import build, run, teach

from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.writer import WritePolicy


class Hoarder(TrainingBuffer):
    """A buffer that never forgets."""

    def crowded(self, live):
        return False


async def trained(buffer, steps=60):
    """Every sample that was trained on, and the largest number of train counts. Old lessons are evicted; some episodes take long."""
    rng, waiting, seen, most = random.Random(0), [], [], 0
    async with build(buffer=buffer, write=WritePolicy(dedup_cosine=2.0, capacity=4)) as manager:
        await teach(manager, *"abcd")
        for step in range(steps):
            manager.on_step(step)
            for n in range(3):
                (shown,) = await manager.retrieve("room", rng.choice("abcdefgh"))
                waiting.append((step + rng.choice([0, 0, 1, 15]), f"{step}/{n}", shown.id))
            due = [one for one in waiting if one[0] <= step]
            waiting = [one for one in waiting if one[0] > step]
            await manager.observe([episode(name, shown=[i], success=rng.random() < 0.5) for _, name, i in due])
            await teach(manager, f"lesson {step}")
            while (batch := await manager.pop_batch()) is not None:
                seen += [(s.generation.id, s.reward, s.evidence, s.train_count, s.last_trained_step) for s in batch]
                manager.buffer.record_trained([s.generation.id for s in batch], step=step)
            most = max(most, len(buffer._trained))
    return seen, most


def test_what_is_forgotten_changes_no_sample():
    size = {"batch_size": 2, "capacity": 3}
    kept, all_of_them = run(trained(Hoarder(**size)))
    found, most = run(trained(TrainingBuffer(**size)))
    assert found == kept
    assert any(count > 1 for *_, count, _ in kept), "some are trained on again"
    assert any(int(i[1:]) < step - 8 for i, *_, step in kept), "also by episodes that took long"
    assert most <= 2 * (4 + 3) + 2 < all_of_them
