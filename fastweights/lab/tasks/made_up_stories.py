"""Made-up stories of bAbI's kind, which need no download: who is where, and where things are that people carry."""

import random

from fastweights.lab.tasks.babi_stories import Stories, Story, to_stories

PLACES = ("kitchen", "garden", "hallway", "office", "bathroom", "bedroom")
PEOPLE, THINGS = ("mary", "john", "daniel", "sandra"), ("apple", "football", "milk")
QUESTIONS = 4  # of a story
EVENTS = 2  # before each question


def made_up(limit: int = 0) -> Stories:
    """Stories of the tasks 1 and 2.

    Args:
        limit: number of training and of test stories of each task; 1,000 and 200 when 0.
    """
    rng = random.Random(0)
    train, test = ([make_story(rng, task) for task in (1, 2) for _ in range(limit or count)] for count in (1000, 200))
    return to_stories("made up", train, test)


def make_story(rng: random.Random, task: int) -> Story:
    """A story with four questions: task 1 asks where a person is, task 2 where a thing is that a person took."""
    place_of = dict.fromkeys(PEOPLE, "")
    carrier_of = dict.fromkeys(THINGS, "")
    words: list[str] = []
    answers: list[tuple[int, str]] = []
    for _ in range(QUESTIONS):
        for _ in range(EVENTS):
            person, place = rng.choice(PEOPLE), rng.choice(PLACES)
            place_of[person] = place
            words += [person, "went", "to", "the", place, "."]
            if task == 2:
                thing = rng.choice(THINGS)
                carrier_of[thing] = person
                words += [person, "took", "the", thing, "."]
        if task == 1:
            person = rng.choice([person for person in PEOPLE if place_of[person]])
            words += ["where", "is", person, "?"]
            answer = place_of[person]
        else:
            thing = rng.choice([thing for thing in THINGS if carrier_of[thing]])
            words += ["where", "is", "the", thing, "?"]
            answer = place_of[carrier_of[thing]]
        answers.append((len(words) - 1, answer))
    return Story(task, tuple(words), tuple(answers))
