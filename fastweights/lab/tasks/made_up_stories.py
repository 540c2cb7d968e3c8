"""Made-up facts and questions of bAbI's kind, which need no download."""

import random

from fastweights.lab.tasks.babi_stories import Stories, Story, to_stories

PLACES = ("kitchen", "garden", "hallway", "office", "bathroom", "bedroom")
PEOPLE, THINGS = ("mary", "john", "daniel", "sandra"), ("apple", "football", "milk")


def made_up(limit: int = 0) -> Stories:
    """Who is where, and where a thing is that people carry about."""
    rng = random.Random(0)
    return to_stories(
        "made up", *([_made_up(rng, task) for task in (1, 2) for _ in range(limit or n)] for n in (1000, 200))
    )


def _made_up(rng: random.Random, task: int) -> Story:
    """Who is where (1), and where a thing is that people carry about (2)."""
    at = dict.fromkeys(PEOPLE, "")
    words: list[str] = []
    answers: list[tuple[int, str]] = []
    holder = dict.fromkeys(THINGS, "")
    for _ in range(4):
        for _ in range(2):
            who, place = rng.choice(PEOPLE), rng.choice(PLACES)
            at[who] = place
            words += [who, "went", "to", "the", place, "."]
            if task == 2:
                thing = rng.choice(THINGS)
                holder[thing] = who
                words += [who, "took", "the", thing, "."]
        if task == 1:
            asked = rng.choice([p for p in PEOPLE if at[p]])
            answer = at[asked]
        else:
            asked = rng.choice([t for t in THINGS if holder[t]])
            answer = at[holder[asked]]
        words += ["where", "is", asked, "?"] if task == 1 else ["where", "is", "the", asked, "?"]
        answers.append((len(words) - 1, answer))
    return Story(task, tuple(words), tuple(answers))
