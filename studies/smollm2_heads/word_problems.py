"""Word problems from templates, with names and numbers drawn at random."""

from __future__ import annotations

import random

_NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elif",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kim",
    "Lena",
    "Mei",
    "Noah",
)
_THINGS = ("apples", "books", "marbles", "pencils", "stickers", "cookies", "shells", "cards", "oranges", "stamps")
_PLACES = ("market", "school", "farm", "library", "bakery", "garden")
_TEMPLATES = (
    "{a} has {x} {thing}. {b} gives {a} {y} more, and then {a} loses {z} of them. How many {thing} does {a} have now?",
    "A box holds {x} {thing}. {a} buys {y} boxes and shares all the {thing} equally among {z} friends. How many does "
    "each friend get?",
    "{a} earns ${x} an hour and works {y} hours a day. How much does {a} earn in {z} days?",
    "{a} walks {x} kilometres to the {place} every day, and back again. How far does {a} walk in {y} weeks?",
    "There are {x} children at the {place}. {y} of them are {z} years old and the rest are younger. How many are "
    "younger?",
    "{a} is {x} years older than {b}. In {y} years {b} will be {z}. How old is {a} now?",
    "A train travels at {x} km per hour for {y} hours, then at {z} km per hour for another {y} hours. How far does "
    "it go?",
    "{a} reads {x} pages on Monday, twice as many on Tuesday and {y} fewer on Wednesday than on Tuesday. How many "
    "pages does {a} read in all?",
    "A shirt costs ${x}. It is sold with a discount of {y} percent. How much do {z} shirts cost?",
    "{a} plants {x} rows of {y} flowers in the garden. {z} flowers do not grow. How many flowers grow?",
    "The {place} sells {thing} at {x} for ${y}. How much do {z} {thing} cost?",
    "{a}, {b} and {c} share {x} {thing}. {b} gets {y} more than {a}, and {c} gets {z}. How many does {a} get?",
    "A tank holds {x} litres. It loses {y} litres an hour and {z} litres are poured in once. After how many hours is "
    "it empty?",
    "{a} saves ${x} in the first week and ${y} more in every week after it. How much has {a} saved after {z} weeks?",
    "Solve for x: {x}x + {y} = {z}. Explain each step.",
    "What is {x} times {y}, minus {z}? Show your work.",
    "The sides of a rectangle are {x} cm and {y} cm. What are its area and its perimeter?",
)
_FORMS = (
    "{problem}",
    "{problem}",
    "Question: {problem}\nAnswer:",
    "{problem} Think step by step.",
    "Solve this problem: {problem}",
)


def word_problem(chooser: random.Random) -> str:
    """One problem; its numbers need not make sense, as those that users type."""
    a, b, c = chooser.sample(_NAMES, 3)
    x, y, z = chooser.randint(3, 90), chooser.randint(2, 30), chooser.randint(2, 20)
    problem = chooser.choice(_TEMPLATES).format(
        a=a, b=b, c=c, x=x, y=y, z=z, thing=chooser.choice(_THINGS), place=chooser.choice(_PLACES)
    )
    return chooser.choice(_FORMS).format(problem=problem)
