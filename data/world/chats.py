"""Small talk of the made-up world: greetings, facts about it, follow-ups and opinions."""

import random

from specdraft.data.world import lexicon
from specdraft.data.world.lexicon import Exchange, article, facts, pronouns, say

# kind -> attribute -> (question, short question for a follow-up, answer)
ASK: dict[str, dict[str, tuple[str, str, str]]] = {
    "town": {
        "region": (
            "[Where is|Where can I find|Can you tell me where to find] {x}?",
            "[Where is it|And where is it|Where exactly is that]?",
            "{x} [lies|is] {v}[.|, and the road there is easy to find.|, a day's walk from "
            "{other}.]",
        ),
        "river": (
            "[Which river runs through|What river flows past|Is there a river in] {x}?",
            "[Is there a river|Which river is there|What river flows there]?",
            "[The river {v} runs through {x}.|The {v} flows past {x}.|{x} was built on the banks "
            "of the {v}.][| In {season} its water is [cold and clear|high and brown|slow and "
            "green].]",
        ),
        "craft": (
            "[What is {x} known for|What do people make in {x}|What can I buy in {x}]?",
            "[What do people make there|What is it known for|And what could I buy there]?",
            "[People in {x} make {v}.|{x} is known for its {v}.|The workshops of {x} are famous "
            "for their {v}.][| You can see them at the market [every week|every {season}].]",
        ),
        "food": (
            "[What do people eat in {x}|Which food is typical of {x}|I am hungry in {x}. What "
            "should I try]?",
            "[What do people eat there|And what should I eat there|Which food is typical]?",
            "[In {x} people eat {v}.|You should try the {v}.|Everybody in {x} loves {v}.|The best "
            "thing to eat in {x} is {v}.][| It tastes best [in {season}|by the fire|at the inn].]",
        ),
        "people": (
            "[How many people live in {x}|How big is {x}|Is {x} a large town]?",
            "[How many people live there|How big is it|Is it a large town]?",
            "[About {v} people live in {x}.|{x} has about {v} people.|It is home to about {v} "
            "people.][| Most of them [work in the fields|know each other|were born there].]",
        ),
    },
    "person": {
        "job": (
            "[What does {x} do|What is {x}'s job|How does {x} earn a living]?",
            "[What is {his} job|What does {he} do all day|And how does {he} earn a living]?",
            "{x} is {v}.[| {He} [gets up early|works long hours|likes the work] [every day|even in "
            "{season}].| {He} learned it from {other}.]",
        ),
        "town": (
            "[Where does {x} live|Which town does {x} come from|Where can I meet {x}]?",
            "[Where does {he} live|Which town does {he} come from|And where can I meet {him}]?",
            "[{x} lives in {v}.|{x} has a small house in {v}.|You can meet {x} in {v}.][| {He} "
            "[moved there|came there|was born there] in {season}.]",
        ),
        "hobby": (
            "[What does {x} like to do|What is {x}'s hobby|How does {x} spend the evenings]?",
            "[What does {he} like to do|Does {he} have a hobby|And in the evenings]?",
            "[{x} likes {v}.|{x} enjoys {v}.|{x} spends {his} free time {v}.][| [Sometimes|Often] "
            "{other} joins {him}.| {He} started it [last|one] {season}.]",
        ),
        "pet": (
            "[Does {x} have a pet|Which animal lives with {x}|What kind of pet does {x} keep]?",
            "[Does {he} have a pet|Which animal lives with {him}|And a pet]?",
            "[{x} has {v}.|Yes, {x} keeps {v}.|There is {v} in {x}'s house.][| Its name is [Pip|"
            "Button|Moss|Biscuit|Nettle|Dot].| It [sleeps by the door|follows {him} everywhere|"
            "likes {season} best].]",
        ),
        "food": (
            "[What does {x} like to eat|What is {x}'s favourite food|What should I cook for {x}]?",
            "[What does {he} like to eat|What is {his} favourite food|And what should I cook for "
            "{him}]?",
            "[{x} loves {v}.|{x}'s favourite food is {v}.|You should cook {v} for {x}.][| {He} "
            "could eat it [every day|all {season}|with every meal].]",
        ),
    },
    "animal": {
        "diet": (
            "[What does {a} eat|What should I feed {a}|What is the favourite food of {a}]?",
            "[What does it eat|What should I feed it|And its food]?",
            "[The {x} eats {v}.|{A} lives on {v}.|It mostly eats {v}.][| In {season} it [eats "
            "twice as much|finds plenty|has to search for them].]",
        ),
        "home": (
            "[Where does {a} live|Where would I find {a}|Where does {a} make its home]?",
            "[Where does it live|Where would I find one|And its home]?",
            "[The {x} lives {v}.|You can find {a} {v}.|{A} makes its home {v}.][| Look for it "
            "[early in the morning|in {season}|when it is quiet].]",
        ),
        "habit": (
            "[What is special about {a}|Tell me something about the {x}|What should I know about "
            "{a}][?|, please.]",
            "[What is special about it|What else should I know|Tell me more about it][?|, please.]",
            "[The {x} {v}.|Everybody knows that the {x} {v}.|{A} {v}.][| It is [shy|clever|patient|"
            "gentle|stubborn], too.]",
        ),
    },
    "food": {
        "taste": (
            "[How does {x} taste|What is the taste of {x}|Will I like {x}]?",
            "[How does it taste|What does it taste like|Will I like it]?",
            "[It tastes {v}.|{X} is {v}.|Most people say that it is {v}.][| With [salt|honey|"
            "pepper|lemon] it is even better.]",
        ),
        "meal": (
            "[When do people eat {x}|When should I serve {x}|What is {x} good for]?",
            "[When do people eat it|When should I serve it|And what is it good for]?",
            "[{X} is eaten for {v}.|People have it for {v}.|It is made for {v}.][| Nobody has it "
            "in {season}, though.]",
        ),
        "part": (
            "[What do I need for {x}|How is {x} made|What is in {x}]?",
            "[What do I need for it|How is it made|What is in it]?",
            "[You need a lot of {v}.|It is made with {v}.|The secret of {x} is {v}.][| Cook it "
            "[slowly|for an hour|twice], then let it [rest|cool].]",
        ),
    },
}


def question(
    rng: random.Random, kind: str, x: str, attribute: str, follow_up: bool = False
) -> Exchange:
    """Ask for one attribute of `x` and answer from the facts of the world."""
    long, short, answer = ASK[kind][attribute]
    value = facts()[kind][x][attribute]
    slots = {
        "x": x,
        "X": x.capitalize() if kind == "food" else x,
        "a": article(x),
        "A": article(x).capitalize(),
        "v": article(value) if attribute in ("job", "pet") else value,
        **pronouns(x).slots(),
        "season": rng.choice(lexicon.SEASONS),
        "other": rng.choice(lexicon.TOWNS if kind == "town" else lexicon.NAMES),
    }
    asked = say(rng, short if follow_up else long, **slots)
    return asked, say(rng, answer, **slots)


def about_entity(rng: random.Random, turns: int) -> list[Exchange]:
    """Ask about one entity; later turns refer to it only by a pronoun."""
    kind = rng.choices(list(ASK), weights=[5, 5, 3, 2])[0]
    x = rng.choice(list(facts()[kind]))
    attributes = rng.sample(list(ASK[kind]), min(turns, len(ASK[kind])))
    return [question(rng, kind, x, name, n > 0) for n, name in enumerate(attributes)]


def introduce(rng: random.Random) -> Exchange:
    """Greet, with the user's name, town and reason; the answer takes them up."""
    name, town = rng.choice(lexicon.NAMES), rng.choice(lexicon.TOWNS)
    about, slots = facts()["town"][town], {"name": name, "town": town}
    user = say(
        rng,
        "[Hi|Hello|Good morning|Good evening|Hey][!|, I am {name}.|, my name is {name}.] "
        "[I come from {town}.|I am on my way to {town}.|I live in {town} now.|Greetings from "
        "{town}.][| How are you?| Nice to meet you.]",
        **slots,
    )
    hello = "[Hello|Hi|Welcome|Good to see you]" + (f", {name}" if name in user else "")
    answer = say(
        rng,
        f"{hello}[!|.] [I am fine, thank you.|It is a pleasure to meet you.|I am glad that you "
        "wrote.] [{town} is a nice place, with the best {food} I know of.|I have heard of {town}, "
        "where people make {craft}.|{town} lies {region}, does it not?] [How can I help you?|What "
        "would you like to talk about?|Shall I tell you a story?|Do you need some help today?]",
        **slots,
        **about,
    )
    return user, answer


def opinion(rng: random.Random) -> Exchange:
    """Ask which of two things is better; either answer is fine, with a reason."""
    topic, options, reasons = rng.choice(OPINIONS)
    a, b = rng.sample(options, 2)
    user = say(rng, topic, a=a, b=b)
    chosen = rng.choice((a, b))
    answer = say(
        rng,
        "[I would choose {c}|I prefer {c}|My favourite is {c}|That is hard, but I would take {c}]"
        "[, because|. The reason is simple:|, since] " + reasons + "[| What about you?| And {d} is "
        "not bad either.| Some people like {d} better, of course.]",
        c=chosen,
        d=b if chosen == a else a,
    )
    return user, answer


OPINIONS = (
    (
        "[Do you prefer|Which is better,|What would you cook for guests,|Help me choose:] {a} or "
        "{b}?",
        lexicon.FOODS,
        "it [keeps you warm|is easy to make|smells wonderful|reminds me of a feast|never fails].",
    ),
    (
        "[Would you rather meet|Which animal do you like more,|Who is more clever,] {a} or {b}?",
        [article(animal) for animal in lexicon.ANIMALS],
        "it is [quick and clever|good company|hard to fool|gentle with children|a patient friend].",
    ),
    (
        "[Which hobby is better,|I have a free day. Should I try|What do you enjoy more,] {a} or "
        "{b}?",
        lexicon.HOBBIES,
        "it [clears the head|costs nothing|can be done with friends|makes the evening short].",
    ),
    (
        "[Should I travel to|Which town is nicer,|Where should I spend the summer,] {a} or {b}?",
        lexicon.TOWNS,
        "the [people are kind|streets are quiet|market is lively|inn is cheap|view is lovely] "
        "there.",
    ),
)


def chat(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges of small talk."""
    exchanges: list[Exchange] = []
    if rng.random() < 0.25:
        exchanges.append(introduce(rng))
    if rng.random() < 0.25:
        exchanges.append(opinion(rng))
    if len(exchanges) < turns:
        exchanges += about_entity(rng, turns - len(exchanges))
    return exchanges[:turns]
