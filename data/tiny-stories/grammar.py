"""The words and tellings of the tiny-stories corpus; `corpus.py` turns them into documents.

All of the text is our own. A telling is a string in a small language:

    [a|b|c]      one of the alternatives, each as likely as the next; they nest, and one may be empty
    {name}       what the story calls `name`: the hero's name, the lost thing, its colour
    {^name}      the same with a capital letter, for the start of a sentence
    {a:name}     the same with "a" or "an" in front ({A:name}: "A" or "An")
    {the:name}   the same with "the" in place of its "a" or "an"
    {the:name}   the same with "the" in place of its "a" or "an"

A hero is `h` with the pronouns `he`, `him`, `his`; the other character is `f` with `fhe`, `fhim`, `fhis`.
`fintro` introduces the other character ("her friend Tom"). `when` opens the first sentence of the plot
("One windy morning, ") or is empty where the opening has already said when.
"""

from __future__ import annotations

from typing import Any, NamedTuple

GIRLS = (
    "Mia", "Lily", "Anna", "Zoe", "Ella", "Ruby", "Nora", "Ivy", "Clara", "Rosa", "Maya", "Lucy", "Emma",
    "Tess", "Hana", "Amira", "Freya", "Sofia", "Kira", "Nina", "Wendy", "Olive", "Priya", "Alma", "Greta",
    "Leila", "Molly", "Yuki",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Finn", "Omar", "Theo", "Hugo", "Noah", "Eli", "Oscar",
    "Ravi", "Felix", "Luca", "Daniel", "Peter", "Jonas", "Ali", "Milo", "Kofi", "Arlo", "Simon", "Otto",
    "Victor", "Diego", "Kenji",
)  # fmt: skip
ANIMAL_NAMES = (
    "Pip", "Momo", "Dot", "Bramble", "Nutmeg", "Pepper", "Biscuit", "Clover", "Hazel", "Tumble", "Button",
    "Maple", "Fern", "Poppy", "Rusty", "Willow", "Acorn", "Pebble", "Misty", "Sunny", "Bean", "Juniper",
    "Toffee", "Waffle",
)  # fmt: skip

# kind -> where it may live; each takes a landscape from LANDSCAPES.
ANIMALS = {
    "fox": ("in a cosy den", "in a den under a hill"),
    "rabbit": ("in a warm burrow", "in a burrow under the roots"),
    "mouse": ("in a hollow log", "in a tiny hole"),
    "squirrel": ("in a hollow oak", "high up in a pine tree"),
    "hedgehog": ("in a nest of dry leaves", "under a thick hedge"),
    "duck": ("among the reeds", "in a nest of soft grass"),
    "frog": ("on a wide lily pad", "under a mossy stone"),
    "bear": ("in a deep cave", "in a den behind a waterfall"),
    "turtle": ("on a muddy bank", "beside a quiet pool"),
    "badger": ("in a tidy sett", "in a long tunnel"),
    "otter": ("on a river bank", "in a hole under a willow tree"),
    "beaver": ("in a house of sticks", "behind a big dam"),
}  # fmt: skip
LANDSCAPES = (
    "in Whispering Wood", "by Silver Pond", "in Thistle Valley", "near Stony Brook",
    "at the edge of Green Marsh", "in Moonlight Forest", "by Otter Creek", "on Heather Hill",
    "near Duckweed Lake", "in Hazel Wood",
)  # fmt: skip
TOWNS = (
    "Maple Hill", "Pebble Bay", "Willowbrook", "Applewood", "Sandy Cove", "Little Ferry", "Cherry Corner",
    "Windmill Green", "Oak Harbour", "Honeyfield", "Bluestone", "Lantern Street",
)  # fmt: skip
HOMES = (
    "in a small town called {town}", "in a little village called {town}", "on a farm near {town}",
    "in a {paint} house in {town}", "above a bakery in {town}", "in a cottage just outside {town}",
    "beside a lighthouse near {town}", "in a tall house in the middle of {town}",
)  # fmt: skip
PAINTS = ("white", "yellow", "green", "pink", "brick")

COLOURS = (
    "red", "blue", "green", "yellow", "purple", "orange", "white", "silver", "pink", "brown", "golden",
)  # fmt: skip
TRAITS = (
    "kind", "brave", "curious", "cheerful", "clever", "quiet", "shy", "gentle", "lively", "careful",
    "busy", "friendly", "patient", "dreamy", "funny", "polite",
)  # fmt: skip
LIKES = (
    "to sing", "to draw", "to climb", "to count the stars", "to paint", "to dance", "to read",
    "to run fast", "to jump in puddles", "to look at clouds", "to listen to old stories",
    "to collect smooth stones", "to whistle", "to help others", "to play hide and seek",
    "to pick berries", "to make up songs", "to ask questions",
)  # fmt: skip

# Older people and animals who help: name, introduction, pronoun. "{his}" is the hero's.
ELDERS = (
    ("Grandma", "{his} grandma", "she"), ("Grandpa", "{his} grandpa", "he"),
    ("Aunt May", "{his} aunt May", "she"), ("Uncle Joe", "{his} uncle Joe", "he"),
    ("Mrs. Plum", "Mrs. Plum, the baker,", "she"), ("Mr. Finch", "Mr. Finch, the postman,", "he"),
    ("Miss Reed", "Miss Reed, the teacher,", "she"), ("Mr. Stone", "Mr. Stone, the gardener,", "he"),
    ("Mrs. Lake", "Mrs. Lake from next door", "she"), ("Captain Brown", "old Captain Brown", "he"),
    ("Doctor Hill", "Doctor Hill", "she"),
)  # fmt: skip
ANIMAL_ELDERS = (
    ("Old Owl", "wise Old Owl", "he"), ("Mrs. Badger", "Mrs. Badger", "she"),
    ("Mr. Heron", "tall Mr. Heron", "he"), ("Grandmother Goose", "Grandmother Goose", "she"),
    ("Uncle Mole", "{his} uncle Mole", "he"), ("Aunt Hare", "{his} aunt Hare", "she"),
    ("Old Toad", "slow Old Toad", "he"), ("Mother Deer", "Mother Deer", "she"),
)  # fmt: skip

# weather -> (words for "one ... morning", sentences)
WEATHER = {
    "sunny": (
        ("sunny", "bright", "warm"),
        (
            "The sun was shining.", "The sky was blue[| and clear].",
            "The [air|day] was mild.", "There was not a cloud in the sky.",
        ),
    ),
    "windy": (
        ("windy", "breezy"),
        (
            "The wind was blowing[| hard].", "The leaves danced in the wind.",
            "The wind [sang|whistled] in the trees.",
        ),
    ),
    "rainy": (
        ("rainy", "wet", "grey"),
        ("The rain was falling.", "Big drops fell from the sky.", "There were puddles everywhere."),
    ),
    "snowy": (
        ("snowy", "cold winter"),
        ("Snow lay on the ground.", "Soft snow was falling.", "Everything was white with snow."),
    ),
    "misty": (("misty", "foggy"), ("A soft mist hung in the air.", "The mist was as thick as milk.")),
}  # fmt: skip

INDOOR_SPOTS = (
    "under the bed", "behind the sofa", "in the toy box", "on the windowsill", "in the kitchen",
    "on the stairs", "under the table", "in the attic", "behind the curtain",
)  # fmt: skip
OUTDOOR_SPOTS = (
    "near the pond", "under the old bench", "behind the shed", "under the apple tree", "beside the gate",
    "by the well", "behind the barn", "in the long grass", "under a bush", "near the haystack",
    "beside the road",
)  # fmt: skip
WILD_SPOTS = (
    "under a pile of leaves", "behind a mossy stone", "in the tall grass", "near the stream",
    "inside a hollow log", "under a fern", "beside the berry bush", "behind the old stump",
    "on the sandy bank", "between two roots", "under the bridge", "at the foot of the oak",
    "in the reeds", "by the waterfall",
)  # fmt: skip
JUNK = (
    "a sleepy beetle", "an old sock", "a spider", "a dry leaf", "some dust", "a broken cup",
    "a small feather",
)  # fmt: skip
TOYS = (
    "hat", "scarf", "ball", "teddy bear", "book", "whistle", "bell", "blanket", "mitten", "marble",
    "lantern", "toy boat", "drum", "ribbon", "cup", "umbrella", "key", "paintbrush", "basket", "button",
)  # fmt: skip
SMALL_THINGS = (
    "shell", "feather", "button", "bell", "acorn", "ribbon", "marble", "stone", "key", "coin", "pencil",
    "pine cone", "flower", "spoon", "candle", "apple",
)  # fmt: skip
FOODS = (
    "apple pie", "honey cake", "plum jam", "berry tart", "warm bread", "carrot soup", "pumpkin soup",
    "nut cookies", "pancakes", "hot porridge",
)  # fmt: skip
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SAD = ("sad", "worried", "upset", "unhappy", "gloomy")
GLAD = ("happy", "proud", "glad", "cheerful", "joyful")


class Plot(NamedTuple):
    """One kind of story.

    `cast` is who may be the hero (child, animal, any); `friend` is who the other character is: a peer, an
    elder, one of the family (kin), any of these, or none. `slots` are drawn for each story: a key "a,b" takes
    the two values of one entry, "x*3" takes x1, x2, x3 without repeats. `beats` are told in order; one that
    begins with "?" may be left out. `facts` are questions with their answers, and `about` is what a request
    for such a story may name.
    """

    cast: str
    friend: str
    weather: tuple[str, ...]
    slots: dict[str, tuple[Any, ...]]
    beats: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    about: tuple[str, ...]


ANY_WEATHER = ("sunny", "windy", "rainy", "snowy", "misty")
DRY = ("sunny", "windy", "misty")

ARRIVES = (
    "[Just then,|Soon|Then|After a while,|At that moment,|A little later,] {fintro} [came by|came "
    "along|came to see {him}|walked past]."
)  # fmt: skip

PLOTS = {
    "lost": Plot(
        cast="any",
        friend="any",
        weather=ANY_WEATHER,
        slots={
            "thing": TOYS,
            "colour": COLOURS,
            "spot*3": (),
            "junk": JUNK,
            "sad": SAD,
            "glad": GLAD,
        },
        beats=(
            (
                "{when}{h} [could not find|had lost] {his} {colour} {thing}.[| It was {his} favourite "
                "thing in the whole world.| {He} had had it since {he} was very small.] {h} [felt|was] "
                "[very|so|rather] {sad}."
            ),
            (
                "[First, {he} looked|{He} looked] {spot1}[, but the {thing} was not there|, but there was "
                "only {junk}|. There was only {junk}]."
            ),
            (
                "?[Next, {he} looked|Then {he} looked] {spot2}. [No {thing}!|The {thing} was not there "
                "either.]"
            ),
            ARRIVES,
            '"[What is wrong|Why do you look so {sad}], {h}?" asked {f}[| kindly].',
            (
                '"[I have lost my {colour} {thing}|My {colour} {thing} is gone]," said {h}[| at once| '
                "softly]."
            ),
            (
                '"[Do not worry|Do not cry|Cheer up]," said {f}[| kindly| gently| with a smile]. "[We '
                'will find it together|Two can look better than one|I will help you look]."'
            ),
            (
                '?"Where did you play yesterday?" asked {f}[| kindly]. {h} [thought|thought and '
                'thought|thought for a moment]. "[I think I was|I was] {spot3}!"'
            ),
            "They [went to look|looked] {spot3}, and there [it was|was the {colour} {thing}]!",
            (
                '"[Thank you|Oh, thank you], {f}!" [said|cried|shouted] {h}. {He} [hugged|held] the '
                "{thing} [tightly|close] and felt {glad} again."
            ),
            (
                "?From that day on, {h} always [put the {thing} back in its place|took good care of {his} "
                "{thing}]."
            ),
        ),
        facts=(
            ("What did {h} lose?", "{h} lost {his} {colour} {thing}."),
            ("What colour was the {thing}?", "The {thing} was {colour}."),
            ("Where was the {thing}?", "The {thing} was {spot3}."),
            ("Who helped {h}?", "{f} helped {h}."),
            ("How did {h} feel at the start?", "At the start, {h} felt {sad}."),
            ("Where did {h} look first?", "First, {h} looked {spot1}."),
        ),
        about=("{a:colour} {thing}",),
    ),
    "stuck": Plot(
        cast="any",
        friend="any",
        weather=("windy",),
        slots={
            "thing": ("kite", "balloon", "hat", "paper plane", "scarf", "ball"),
            "colour": COLOURS,
            "up": ("an apple tree", "a tall pine", "an old oak", "a roof", "a high wall"),
            "tool": ("a long stick", "a ladder", "a rope", "a fishing rod", "a broom"),
            "sad": SAD,
            "glad": GLAD,
        },
        beats=(
            (
                "{when}{h} was [playing|running about] outside with {a:colour} {thing}.[| {He} laughed as "
                "{he} ran.]"
            ),
            (
                "[Suddenly|All at once|Then] a [strong|big|sudden] wind [took|blew] the {thing} [up, up, "
                "up|away|high into the air], and it [got stuck|landed] on {up}."
            ),
            (
                '"Oh no!" [cried|said] {h}. {He} [jumped|jumped as high as {he} could|stood on {his} '
                "toes], but [{he} was too small|it was too high|{he} could not reach it]. {He} [felt|was] "
                "[|very |a little ]{sad}."
            ),
            ARRIVES,
            '"[Can you help me|Will you help me], {f}?" asked {h}. "My {colour} {thing} is stuck!"',
            (
                '{f} [looked up|looked up at the {thing}] and thought[| for a while]. "[I know what to '
                'do|I have an idea]," {fhe} said. "[We need|Let us use] {tool}."'
            ),
            (
                "[Together they fetched|They went to get|They ran to find] {tool}. [One, two, three!|It "
                "took a long time.|They tried once, and they tried twice.] [At last|Then] the {thing} "
                "came down."
            ),
            (
                "{h} [was|felt] [|very |so ]{glad}. [{He} thanked {f} and let {fhim} play with the "
                '{thing} too|"Thank you! Now we can play together," {he} said|"You are so clever, {f}," '
                "{he} said]."
            ),
            (
                "?They played with the {colour} {thing} until [it was time for supper|the sun went "
                "down|the first star came out]."
            ),
        ),
        facts=(
            ("What got stuck?", "{A:colour} {thing} got stuck."),
            ("Where did the {thing} get stuck?", "It got stuck on {up}."),
            ("What colour was the {thing}?", "The {thing} was {colour}."),
            ("What did they use to get the {thing} down?", "They used {tool}."),
            ("Who helped {h}?", "{f} helped {h}."),
        ),
        about=("{a:colour} {thing}",),
    ),
    "baby": Plot(
        cast="any",
        friend="none",
        weather=ANY_WEATHER,
        slots={
            "baby,mother,sound": (
                ("kitten", "cat", "meow"), ("duckling", "duck", "quack"), ("puppy", "dog", "bark"),
                ("lamb", "sheep", "baa"), ("chick", "hen", "cluck"), ("calf", "cow", "moo"),
                ("piglet", "pig", "oink"), ("owlet", "owl", "hoot"), ("gosling", "goose", "honk"),
                ("foal", "horse", "neigh"),
            ),
            "colour": ("white", "brown", "grey", "black", "spotted"),
            "outside*2": (),
            "glad": GLAD,
        },
        beats=(
            (
                "{when}{h} heard a [tiny|small|sad] sound. {He} [looked|went to look] {outside1} and "
                "found [a little|a tiny|a baby] {colour} {baby}."
            ),
            (
                '"[Where is your mother|Are you lost], little {baby}?" asked {h}. The {baby} [began to '
                "cry|only shivered|looked up with big eyes]."
            ),
            (
                "?{h} [wanted to help|felt sorry for it|could not leave it alone]. But [{he} did not know "
                "where to look|the mother was nowhere to be seen|the {baby} was too scared to walk]."
            ),
            (
                '[Then {h} had an idea|{h} thought hard|{h} sat down to think]. "[If we are very quiet, '
                'we may hear her|Let us listen|We must be quiet and listen]," {he} said.'
            ),
            (
                'They listened. [Far away|From somewhere near|After a while], something went "{sound}, '
                '{sound}!" It came from somewhere {outside2}.'
            ),
            (
                "{h} [carried|took|led] the {baby} [there|toward the sound]. A big {colour} {mother} came "
                "running. It was the mother!"
            ),
            "The {mother} [hugged|nuzzled|cuddled] her {baby}, and {h} felt {glad}.",
            "?Every day after that, the {baby} came to [play with {h}|visit {h}|say hello to {h}].",
        ),
        facts=(
            ("What did {h} find?", "{h} found a little {colour} {baby}."),
            ("Where did {h} find the {baby}?", "{h} found the {baby} {outside1}."),
            ("What colour was the {baby}?", "The {baby} was {colour}."),
            ("Where was the mother?", "The mother was {outside2}."),
            ("What sound did {h} hear?", 'The sound was "{sound}, {sound}!"'),
        ),
        about=("a lost {baby}",),
    ),
    "afraid": Plot(
        cast="any",
        friend="any",
        weather=ANY_WEATHER,
        slots={
            "fear,try,end": (
                ("the dark", "go into the dark cellar", "sat in the dark and was not afraid at all"),
                ("the deep water", "put one foot in the water", "swam all the way across"),
                ("loud thunder", "count the seconds after the flash", "laughed at the thunder"),
                ("high places", "climb up one step", "stood at the very top and waved"),
                ("the big dog next door", "say hello to the dog", "was patting the big dog"),
                ("singing in front of others", "sing one small note", "sang a whole song to everyone"),
                ("the old bridge", "take one step onto the bridge", "ran over the bridge and back"),
                (
                    "the tall slide", "climb to the top of the slide",
                    "went down the tall slide again and again",
                ),
            ),
            "thing": ("button", "stone", "feather", "bell", "lantern", "ribbon", "shell"),
            "colour": COLOURS,
            "glad": ("brave", "proud", "happy", "strong"),
        },
        beats=(
            (
                "{h} was afraid of [only one thing: {fear}|{fear}].[| Nobody knew.| It made {him} sad.| "
                "{His} knees shook whenever {he} thought of it.]"
            ),
            (
                "{when}{h} wanted to [be brave|stop being afraid|be brave at last], but [{his} heart beat "
                "fast|{he} did not know how|{he} could not do it]."
            ),
            ARRIVES,
            '"I am afraid of {fear}," {h} [whispered|said softly|said].',
            (
                '"[That is all right|Everyone is afraid of something]," said {f}[| kindly| gently| with a '
                'smile]. "[I was afraid too, once|You do not have to do it alone|Being brave means '
                'trying]."'
            ),
            (
                '{f} gave {him} a small {colour} {thing}. "[Hold this|Keep this with you|Hold it tight], '
                'and [try to|just] {try}."'
            ),
            (
                "{h} held the {colour} {thing} [tightly|close] and took a deep breath. "
                "[Slowly|Carefully|Step by step], {he} tried it. [It was not so bad|Nothing bad "
                "happened|It was easier than {he} thought]!"
            ),
            "[Before long|Soon|In the end], {h} {end}. {He} felt {glad}.",
            '?"I am not afraid of {fear} any more," {he} said[.| to {f}.]',
            "?{h} still keeps the {colour} {thing}[.| under {his} pillow.]",
        ),
        facts=(
            ("What was {h} afraid of?", "{h} was afraid of {fear}."),
            ("What did {f} give {h}?", "{f} gave {h} a small {colour} {thing}."),
            ("Who helped {h}?", "{f} helped {h}."),
            ("How did {h} feel at the end?", "At the end, {h} felt {glad}."),
            ("What colour was the {thing}?", "The {thing} was {colour}."),
        ),
        about=("someone who is afraid of {fear}",),
    ),
    "share": Plot(
        cast="any",
        friend="peer",
        weather=DRY,
        slots={
            "thing,fair,how": (
                ("swing", "took turns", "First {f} sat on the swing, then {h}."),
                ("red apple", "cut it in two", "Each of them got one half."),
                ("pear", "cut it in two", "Each of them got one half."),
                ("wagon", "took turns", "First {f} pulled and {h} rode, then the other way round."),
                ("drum", "took turns", "First {f} played the drum, then {h}."),
                ("boat", "rowed it together", "{h} took one oar, and {f} took the other."),
                ("bicycle", "took turns", "First {f} rode down the path, then {h}."),
                ("storybook", "read it together", "{h} read one page, and {f} read the next."),
            ),
            "place": (
                "at the edge of the meadow", "near the old mill", "by the big oak",
                "at the end of the path", "under a tree", "beside the river", "next to the school",
            ),
            "glad": GLAD,
        },
        beats=(
            "{when}{h} and {fintro} found {a:thing} {place}. There was only one.",
            (
                '"[It is mine|I saw it first]!" said {h}[| loudly]. "[No, it is mine|No, I saw it '
                'first]!" said {f}.'
            ),
            (
                "?[They pulled and they shouted|They both began to shout|They would not look at each "
                "other]. [Neither of them was happy|Nobody had any fun|It was not a nice game at all]."
            ),
            (
                "?[Then|After a while,] {h} [looked at {f}|saw a tear in {f}'s eye|grew quiet]. [Was the "
                "{thing} worth more than a friend?|{He} did not want to fight.|{He} thought about how "
                "much {he} liked {f}.]"
            ),
            (
                '"I am sorry," said {h}[| at last| quietly]. "[What if we share it?|Let us share it.|Can '
                'we share it?]"'
            ),
            "So they {fair}. [{how}|It was much more fun that way.|They laughed and laughed.]",
            (
                "{h} felt {glad}. [The {thing} was good, but a friend was better|It was the best day of "
                "the week|Sharing was better than winning]."
            ),
        ),
        facts=(
            ("What did {h} and {f} find?", "They found {a:thing}."),
            ("Where was the {thing}?", "The {thing} was {place}."),
            ("Who said sorry?", "{h} said sorry."), ("Who was {h} with?", "{h} was with {f}."),
        ),
        about=("two friends and {a:thing}",),
    ),
    "make": Plot(
        cast="any",
        friend="any",
        weather=ANY_WEATHER,
        slots={
            "thing,fail,fix,end": (
                ("cake", "it came out flat", "two more eggs", "the cake rose high and smelled sweet"),
                ("boat", "it sank", "a little wax", "the boat floated like a swan"),
                ("kite", "it fell down", "a longer tail", "the kite flew up to the clouds"),
                ("birdhouse", "it fell apart", "some strong nails", "a little bird moved in"),
                ("puppet", "one arm came off", "stronger thread", "the puppet danced and bowed"),
                ("tower of blocks", "it fell over", "a wider bottom", "the tower reached the ceiling"),
                ("basket", "it had a hole", "thicker grass", "the basket held ten apples"),
                ("bridge", "it broke", "two long planks", "the bridge was strong and safe"),
                ("lantern", "it would not glow", "a new candle", "the lantern shone like the moon"),
                ("raft", "it tipped over", "one more log", "the raft carried them both"),
            ),
            "colour": COLOURS,
            "glad": GLAD,
            "sad": SAD,
        },
        beats=(
            (
                '{when}{h} wanted to make {a:thing}.[| "It will be the best {thing} of all," {he} said.] '
                "{He} put on {his} {colour} [apron|cap|gloves] and [began|set to work|got started]."
            ),
            (
                "[{He} worked all morning|{He} worked and worked|{He} hummed while {he} worked]. But when "
                "the {thing} was ready, {fail}!"
            ),
            (
                '{h} [felt|was] [|very |a little ]{sad}. "I [cannot do it|will never do it|am no good at '
                'this]," {he} [said|sighed].'
            ),
            ARRIVES,
            (
                '"[Do not give up|Try again|Nobody gets it right the first time]," said {f}[| kindly| '
                'gently| with a smile]. "[I think it needs|Maybe it needs|All it needs is] {fix}."'
            ),
            (
                "[So they tried again, together|Together they tried once more|So {h} tried again, and {f} "
                "helped]. This time they used {fix}."
            ),
            "And [look|what do you think]! {^end}.",
            (
                '"[We did it|It works|Look at that]!" [cried|shouted|said] {h}. {He} [was|felt] [|very '
                "]{glad}."
            ),
            "?{h} [learned|knew now] that it is fine to fail, if you try again.",
        ),
        facts=(
            ("What did {h} want to make?", "{h} wanted to make {a:thing}."),
            ("What went wrong?", "{^fail}."),
            ("What did the {thing} need?", "It needed {fix}."),
            ("Who told {h} to try again?", "{f} told {h} to try again."),
        ),
        about=("making {a:thing}",),
    ),
    "race": Plot(
        cast="any",
        friend="peer",
        weather=DRY,
        slots={
            "race": ("race", "sack race", "running race", "egg race", "hopping race"),
            "prize": (
                "a golden cup", "a blue ribbon", "a big cake", "a silver bell", "a basket of plums",
            ),
            "hurt": (
                "slipped and fell", "hurt {fhis} foot", "tripped over a root", "got stuck in the mud",
            ),
            "glad": GLAD,
        },
        beats=(
            (
                "{when}there was {a:race}[| in the meadow| by the lake]. The prize was {prize}, and {h} "
                "[wanted to win it|wanted it very much|dreamed of winning it]."
            ),
            (
                "[Everyone stood in a line|They all got ready|The drum went boom]. [Ready, steady, "
                "go!|One, two, three, go!] {h} [was fast|went like the wind|was in front], and {fintro} "
                "was close behind."
            ),
            '[Suddenly|Near the end|Then] {f} {hurt}. "[Ouch|Help]!" cried {f}.',
            (
                "{h} could see the [finish line|end]. {He} could win! But [{he} heard {f} cry|{f} needed "
                "help|{he} looked back]."
            ),
            (
                '{h} stopped. "[Take my hand|Hold on to me|Lean on me]," {he} said. [They walked on '
                "together, slowly|Together they went on, step by step]."
            ),
            (
                "?They came in last, [but everyone clapped|but the people cheered for them|but nobody "
                'laughed]. "[You are a true friend|That was very kind]," said {f}.'
            ),
            "?The winner even shared {prize} with them.",
            (
                "{h} [was|felt] [|very |so ]{glad}. [A friend is better than a prize|Some things are "
                "better than winning|{He} did not mind about the prize at all]."
            ),
        ),
        facts=(
            ("What was the prize?", "The prize was {prize}."),
            ("Why did {h} stop?", "{h} stopped to help {f}."), ("Who fell behind?", "{f} fell behind."),
            ("What kind of race was it?", "It was {a:race}."),
        ),
        about=("{a:race}",),
    ),
    "gift": Plot(
        cast="any",
        friend="any",
        weather=ANY_WEATHER,
        slots={
            "thing,stuff": (
                ("scarf", "old wool"), ("picture", "paper and paint"), ("hat", "soft grass"),
                ("card", "paper and glue"), ("necklace", "string and shells"), ("basket", "dry reeds"),
                ("pillow", "scraps of cloth"), ("toy bear", "scraps of cloth"), ("flag", "an old shirt"),
            ),
            "colour": COLOURS,
            "coins": ("two", "three", "four", "five"),
            "glad": GLAD,
            "sad": SAD,
        },
        beats=(
            (
                "{when}it was {f}'s birthday. {h} wanted to give {fhim} [a present|something nice|a "
                "special present]."
            ),
            (
                "{h} [counted {his} coins|looked in {his} purse|emptied {his} pockets]. There were only "
                "{coins}. [It was not enough|That would not buy much]. {He} [felt|was] [|very |a little "
                "]{sad}."
            ),
            (
                '"[I can make something|I will make a present myself]," {he} thought. {He} '
                "[took|found|fetched] {stuff} and worked [all day|for hours|until it was late]."
            ),
            "[At last|By evening,|In the end,] it was ready: a beautiful {colour} {thing}.",
            (
                '?[But would {f} like it?|"What if {f} does not like it?" {he} thought.] {h} [felt '
                "shy|hid it behind {his} back|was nervous]."
            ),
            (
                '{f} opened the present and [gasped|smiled|clapped]. "[{A:thing}!|You made this?] It is '
                'the best present of all," {fhe} said[| kindly| softly].'
            ),
            (
                "{f} [kept the {colour} {thing} for years|showed the {colour} {thing} to everyone]. And "
                "{h} [was|felt] [|very |so ]{glad}."
            ),
        ),
        facts=(
            ("What did {h} make?", "{h} made {a:colour} {thing}."),
            ("Whose birthday was it?", "It was {f}'s birthday."),
            ("How many coins did {h} have?", "{h} had {coins} coins."),
            ("What did {h} use?", "{h} used {stuff}."),
        ),
        about=("a birthday present",),
    ),
    "garden": Plot(
        cast="any",
        friend="any",
        weather=DRY,
        slots={
            "plant,grown": (
                ("pumpkin", "as big as a chair"), ("sunflower", "taller than the door"),
                ("carrot", "as long as an arm"), ("bean", "up to the window"),
                ("rose", "with a hundred petals"), ("apple tree", "full of sweet apples"),
                ("strawberry plant", "covered in red berries"), ("melon", "as round as the moon"),
            ),
            "pot": ("pot", "box", "bucket", "jar", "basin"),
            "colour": COLOURS,
            "wait": ("a week", "ten days", "two weeks", "a month"),
            "glad": GLAD,
        },
        beats=(
            (
                '{when}{f} gave {h} a tiny seed. "[Plant it and wait|Take good care of it]. It will be '
                '{a:plant}."'
            ),
            (
                "{h} put the seed in {a:colour} {pot} and gave it water. [Then {he} sat down to "
                "watch|{He} looked at it every hour|{He} could not wait]."
            ),
            (
                '[One day went by. Nothing.|Day after day, nothing came up.|Nothing happened.] "[My seed '
                'does not like me|It is a bad seed|It will never grow]," said {h}[| at once| softly].'
            ),
            (
                '"[Be patient|Good things take time]," said {f}[| kindly| gently| with a smile]. "[Seeds '
                'sleep before they wake|Give it water, sun, and time]."'
            ),
            (
                "So {h} [waited|watered the seed and waited]. {He} even sang to it. After {wait}, a small "
                "green leaf peeped out!"
            ),
            (
                "[Bit by bit|Slowly, slowly|Day by day] it grew and grew. In the end it was {a:plant} "
                "{grown}."
            ),
            (
                "{h} [was|felt] [|very |so ]{glad}. {He} shared it with {f}[| and with all {his} friends| "
                "and kept one seed for next year]."
            ),
        ),
        facts=(
            ("What did {h} grow?", "{h} grew {a:plant}."),
            ("Who gave {h} the seed?", "{f} gave {h} the seed."),
            ("What colour was the {pot}?", "The {pot} was {colour}."),
            ("How long did the seed take?", "It took {wait}."),
        ),
        about=("a seed that will not grow", "{a:plant}"),
    ),
    "truth": Plot(
        cast="any",
        friend="elder",
        weather=ANY_WEATHER,
        slots={
            "thing": ("vase", "cup", "plate", "teapot", "bowl", "lamp", "mirror", "jar"),
            "colour": COLOURS,
            "how": ("with a ball", "while dancing", "with an elbow", "while running", "with a broom"),
            "blame": ("the cat", "the wind", "a mouse", "nobody"),
            "glad": ("light", "better", "happy", "glad"),
        },
        beats=(
            (
                "{when}{h} was playing [inside|indoors] and broke {f}'s {colour} {thing} {how}. "
                "[Crash!|Smash!|What a noise!]"
            ),
            (
                "{h} [was scared|turned pale|did not know what to do]. [{He} hid the pieces|{He} pushed "
                'the pieces under a rug]. "I will say it was {blame}," {he} thought.'
            ),
            (
                '[Soon|That evening,|Later,] {f} came in. "[Where is my {colour} {thing}|What happened to '
                'my {colour} {thing}]?" {fhe} asked.'
            ),
            (
                "{h} opened {his} mouth to say it was {blame}. But [{his} tummy hurt|{his} face grew "
                "hot|the lie would not come out]."
            ),
            (
                '"[It was me|I did it]," {he} said [softly|at last]. "I broke it {how}. I am [very|so] '
                'sorry."'
            ),
            (
                '{f} was quiet for a moment. Then {fhe} [smiled|put an arm around {him}]. "[Thank you for '
                'telling the truth|A {thing} can be mended. It was brave to tell me]," {fhe} said[| '
                "kindly| softly]."
            ),
            (
                "They [glued the pieces together|mended the {thing} together|swept up the pieces "
                "together]. {h} felt {glad}."
            ),
        ),
        facts=(
            ("What did {h} break?", "{h} broke {f}'s {colour} {thing}."),
            ("How did {h} break the {thing}?", "{h} broke it {how}."),
            ("Who owned the {thing}?", "The {thing} was {f}'s."),
            ("Who did {h} want to blame?", "{h} wanted to say it was {blame}."),
        ),
        about=("telling the truth", "a broken {thing}"),
    ),
    "new": Plot(
        cast="any",
        friend="peer",
        weather=DRY,
        slots={
            "thing": ("ball", "kite", "skipping rope", "drum", "wagon", "bag of marbles", "toy boat"),
            "colour": COLOURS,
            "game": ("tag", "hide and seek", "catch", "pirates", "hopscotch"),
            "month": ("spring", "summer", "autumn"),
            "glad": GLAD,
        },
        beats=(
            (
                "{h} was new [here|in this place]. {He} had come in the {month} and had no friends yet.[| "
                "{He} missed {his} old home.]"
            ),
            (
                "{when}{h} saw {fintro2} and some others playing {game}. {He} wanted to play too, but "
                "{he} was too shy to ask."
            ),
            (
                "{He} [sat down alone|sat under a tree|stood by the fence] with {his} {colour} {thing}. "
                "[Nobody looked at {him}|{He} sighed]."
            ),
            (
                'Then {f} [looked over|came over|ran up]. "[What a nice {thing}|I like your {colour} '
                '{thing}]!" {fhe} said[| kindly| softly].'
            ),
            (
                '{h} took a deep breath. "[Would you like to try it|Do you want to play with it]?" {he} '
                "asked."
            ),
            (
                '"[Yes, please|I would love to]!" said {f}[| kindly| gently| with a smile]. "And you can '
                'play {game} with us. What is your name?" "{h}," said {h}[| at once| softly].'
            ),
            (
                "They [played until dark|played all afternoon|laughed and played]. {h} was not "
                "[alone|lonely] any more, and {he} was {glad}."
            ),
        ),
        facts=(
            ("What did {h} have?", "{h} had {a:colour} {thing}."),
            ("What game did they play?", "They played {game}."),
            ("Who spoke to {h}?", "{f} spoke to {h}."),
            ("When did {h} come?", "{h} came in the {month}."),
        ),
        about=("making a new friend",),
    ),
    "picnic": Plot(
        cast="any",
        friend="any",
        weather=("sunny",),
        slots={
            "food1,food2": (
                ("bread", "cheese"), ("plums", "nuts"), ("pancakes", "honey"), ("apples", "cake"),
                ("sandwiches", "grapes"), ("berries", "cream"), ("pears", "cookies"),
            ),
            "where": (
                "on the hill", "by the lake", "in the meadow", "near the old mill", "on the beach",
                "by the waterfall",
            ),
            "shelter": (
                "a big tree", "an old boat", "a bridge", "a barn roof", "a red umbrella", "a cliff",
            ),
            "game": ("sang songs", "told riddles", "told stories", "counted the drops", "played cards"),
            "glad": GLAD,
        },
        beats=(
            (
                "{when}{h} and {fintro} [packed|filled] a basket with {food1} and {food2}. They were "
                "going to have a picnic {where}."
            ),
            (
                "[They walked and sang|They skipped along the path|It was a long walk]. But [as soon as "
                "they sat down|when they got there|halfway there], dark clouds came. [Drip, drop!|Plop, "
                "plop!|Down came the rain!]"
            ),
            (
                '"[Our picnic is spoiled|Everything will get wet|What a pity]!" [cried|said] {h}. {He} '
                "wanted to [cry|go home]."
            ),
            (
                '"Wait," said {f}[| kindly| gently| with a smile]. "[Look over there|Look|I see a dry '
                'place]!" {f} pointed to {shelter}.'
            ),
            (
                "They ran and sat down under {the:shelter}. [It was dry and cosy there|Not one drop fell "
                "on them]. They ate the {food1} and the {food2} and {game}."
            ),
            (
                '?[After the rain, a rainbow came out|When the rain stopped, the sun came back]. "[This '
                'was the best picnic ever|I like rainy picnics]," said {h}[| at once| softly].'
            ),
            "?{h} [was|felt] [|very |so ]{glad}.",
        ),
        facts=(
            ("What did they eat?", "They ate {food1} and {food2}."),
            ("Where did they sit?", "They sat under {the:shelter}."),
            ("Where was the picnic going to be?", "It was going to be {where}."),
            ("Who was with {h}?", "{f} was with {h}."),
        ),
        about=("a picnic in the rain", "a picnic {where}"),
    ),
    "way": Plot(
        cast="any",
        friend="none",
        weather=("misty", "sunny"),
        slots={
            "goal": (
                "blackberries", "mushrooms", "firewood", "pretty stones", "wild flowers", "pine cones",
                "nuts",
            ),
            "guide": (
                "the stream", "the sound of a bell", "the old stone wall", "a line of white stones",
                "the smell of soup", "the light of a lamp", "a row of tall trees",
            ),
            "colour": COLOURS,
            "thing": ("coat", "cap", "scarf", "bag", "basket"),
            "kin": ("mother", "father", "grandmother", "big sister", "big brother"),
            "food": FOODS,
        },
        beats=(
            (
                '{when}{h} took {his} {colour} {thing} and went out to look for {goal}. "[Do not go too '
                'far|Stay on the path]," said {his} {kin}.'
            ),
            (
                "{h} found some {goal}, and then some more. [On and on {he} went|Step by step {he} went "
                "deeper into the trees|{He} forgot to look at the path]."
            ),
            (
                "[Then|When {he} looked up,] {he} did not know where {he} was. [The trees all looked the "
                'same|It was getting late|Everything was quiet]. "[I am lost,|Which way is home?]" {he} '
                "[whispered|said]."
            ),
            (
                "?[{He} wanted to cry|{His} eyes filled with tears|{His} legs shook]. But {he} [sat down "
                "and thought|took a deep breath|told {himself} to be calm]."
            ),
            (
                'Then {he} noticed {guide}. "[I can follow it|That is the way], and I will [get|come] '
                'home," {he} [said|thought].'
            ),
            (
                "{h} followed {the:guide}, [step by step|past the trees and over the hill|without "
                "stopping], until {he} saw {his} own door."
            ),
            (
                "{His} {kin} [hugged {him}|held {him} tight|ran to meet {him}] and gave {him} some "
                "{food}. [{h} was safe|How good it was to be home]."
            ),
            "?After that, {h} never left the path again.",
        ),
        facts=(
            ("What did {h} look for?", "{h} looked for {goal}."),
            ("What did {h} follow?", "{h} followed {the:guide}."),
            ("Who waited at home?", "{His} {kin} waited at home."),
            ("What did {h} eat at home?", "{h} ate some {food}."),
            ("What colour was the {thing}?", "The {thing} was {colour}."),
        ),
        about=("getting lost", "someone who looks for {goal}"),
    ),
    "help": Plot(
        cast="any",
        friend="elder",
        weather=ANY_WEATHER,
        slots={
            "load": (
                "a heavy basket", "a big sack", "a pile of wood", "a full bucket", "a box of books",
                "a bag of flour",
            ),
            "plan": (
                "play with {his} friends", "go swimming", "watch the parade", "fly {his} kite",
                "go to the fair",
            ),
            "reward": ("shell", "whistle", "lantern", "music box", "book", "drum", "bell"),
            "colour": COLOURS,
            "glad": GLAD,
        },
        beats=(
            (
                "{when}{h} was on {his} way to {plan}. [{He} was in a hurry|{He} ran as fast as {he} "
                "could|{He} sang as {he} went]."
            ),
            (
                "On the road {he} met {fintro} with {load}. [It was much too heavy|{f} had to stop and "
                "rest|{f} looked tired]."
            ),
            (
                "{h} [stopped|slowed down]. [If {he} helped, {he} would be late|{He} did not want to be "
                "late]. But {f} [sighed|looked so tired|needed help]."
            ),
            (
                '"[Let me help you|I will carry that], {f}," said {h}[| at once| softly]. [Together they '
                "carried it up the hill|It was hard work, and the road was long]."
            ),
            (
                "When they came to the door, {f} [opened an old box|went inside|looked in a drawer] and "
                'took out {a:colour} {reward}. "This is for you," {fhe} said, "[because you are kind|for '
                'your kind heart]."'
            ),
            (
                "{h} [thanked {f}|could not believe it|danced with joy]. {He} [was late, but {he} did not "
                "mind|was late, but {he} was {glad}]."
            ),
            "?And whenever {he} looked at the {colour} {reward}, {he} [smiled|thought of {f}].",
        ),
        facts=(
            ("What did {f} carry?", "{f} carried {load}."),
            ("What did {f} give {h}?", "{f} gave {h} {a:colour} {reward}."),
            ("What did {h} want to do?", "{h} wanted to {plan}."),
            ("What colour was the {reward}?", "The {reward} was {colour}."),
        ),
        about=("helping someone", "{a:colour} {reward}"),
    ),
    "noise": Plot(
        cast="any",
        friend="peer",
        weather=("windy", "rainy", "misty"),
        slots={
            "noise": ("tap, tap, tap", "scratch, scratch", "bump, bump", "creak, creak", "swish, swish"),
            "guess": ("a dragon", "a ghost", "a giant", "a wolf", "a monster"),
            "cause": (
                "a branch at the window", "a hungry mouse", "a loose shutter", "an apple rolling about",
                "a moth in the lamp", "a little cat",
            ),
            "light": ("candle", "lantern", "lamp", "torch"),
            "colour": COLOURS,
        },
        beats=(
            (
                "[Late one night|One dark night|In the middle of the night], {h} and {fintro} heard a "
                'noise. "{^noise}!" it went.'
            ),
            '"[What was that|Did you hear that]?" whispered {f}. "[Maybe it is|I think it is] {guess}!"',
            (
                '?[They hid under the blanket|They held hands|They did not dare to move]. "{^noise}!" '
                "went the noise again."
            ),
            (
                "{h} was scared too, but {he} [wanted to know|was curious|did not like to wait]. {He} "
                'took the {colour} {light} and [tiptoed|crept] forward. "[Stay close to me|Come with me], '
                '{f}," {he} said.'
            ),
            (
                "{h} held up the {light} and [looked|peeped around the corner]. [It was not {guess} at "
                "all|There was no {guess2}]. It was only {cause}!"
            ),
            (
                '?[They laughed until they cried|They both began to laugh|How they laughed]! "[We were '
                'afraid of|All that fuss about] {cause}," said {f}.'
            ),
            (
                "Then {h} put out the {colour} {light}, and they slept [until morning|soundly|like two "
                "stones]."
            ),
        ),
        facts=(
            ("What made the noise?", "It was only {cause}."),
            ("What did {f} think it was?", "{f} thought it was {guess}."),
            ("What did {h} take?", "{h} took the {colour} {light}."),
            ("Who was with {h}?", "{f} was with {h}."),
        ),
        about=("a strange noise",),
    ),
    "carry": Plot(
        cast="any",
        friend="elder",
        weather=ANY_WEATHER,
        slots={
            "load": (
                "a letter", "a cake", "a pot of soup", "a basket of eggs", "a jar of honey",
                "a clean shirt",
            ),
            "to": (
                "the mill", "the lighthouse", "the castle", "the far farm", "the top of the hill",
                "the market",
            ),
            "block,by": (
                ("a wide river", "a row of stones"), ("a wide river", "a small boat"),
                ("a locked gate", "a hole in the hedge"), ("a locked gate", "a kind shepherd"),
                ("a fallen tree", "a gap under the branches"), ("a deep ditch", "a strong plank"),
                ("a herd of goats", "a kind shepherd"), ("a muddy pool", "a dry path"),
            ),
            "glad": GLAD,
        },
        beats=(
            (
                '{when}{f} gave {h} {load}. ["Please take it to {to}[|, and do not stop on the way]," '
                '{fhe} said.|"Can you take it to {to} for me?" {fhe} asked.]'
            ),
            (
                '?"[Yes, I can|Of course], {f}," said {h}[| at once| softly]. {He} [set off|walked down '
                "the road|went on {his} way]."
            ),
            (
                "[Halfway|Before long|After a mile], {he} came to {block}. [There was no way around "
                "it.|{He} could not get past.|How could {he} go on?]"
            ),
            (
                '"[I must not give up|I gave my word]," {he} [said|told {himself}]. {He} looked left, and '
                "{he} looked right. [And then|At last] {he} saw {by}."
            ),
            (
                "With the help of {the:by}, {h} got [to the other side|past it|across]. [{He} held "
                "{the:load} very carefully|Nothing was spilled and nothing was lost]."
            ),
            (
                "When {h} came to {to}, {he} gave {the:load} to [an old woman|a tall man|a smiling cook]. "
                '"[You came just in time|What a good helper you are]!"'
            ),
            (
                "{h} went back to {f} and told {fhim} about {the:block}. {f} was {glad}, and {h} was "
                "{glad} too."
            ),
        ),
        facts=(
            ("What did {h} carry?", "{h} carried {load}."), ("Where did {h} go?", "{h} went to {to}."),
            ("What was in the way?", "There was {block} in the way."), ("Who sent {h}?", "{f} sent {h}."),
            ("What helped {h}?", "It was {by}."),
        ),
        about=("a long walk to {to}",),
    ),
    "pack": Plot(
        cast="any",
        friend="peer",
        weather=DRY,
        slots={
            "item*3": SMALL_THINGS,
            "colour": COLOURS,
            "bag": ("bag", "box", "basket", "chest", "jar"),
            "trip": (
                "across the sea", "to the mountains", "to the moon", "into the jungle",
                "around the world",
            ),
            "glad": GLAD,
        },
        beats=(
            "{when}{h} and {fintro} played that they were going {trip}. {h} took {a:colour} {bag}.",
            (
                'Into the {bag} {he} put {a:item1}, {a:item2}, and {a:item3}. "[Now we are ready|That is '
                'all we need]!" {he} said.'
            ),
            (
                "[They marched around the house|They climbed over a hill|They sailed over the grass]. "
                "[But then|Then] the {colour} {bag} [fell over|tipped over], and everything [rolled|fell] "
                "out."
            ),
            '"[Oh dear|Oh no]! What did we have?" asked {f}. "[We must find it all|Help me look]!"',
            (
                '"I remember," said {h}[| at once| softly]. "{A:item1}, {a:item2}, and {a:item3}." [They '
                "looked and looked|They looked high and low]."
            ),
            (
                "{f} found the {item1} and the {item2}. {h} found the {item3}. [Nothing was missing|They "
                "put it all back]."
            ),
            "[So the trip went on|Then they went on {trip}], and {h} [was|felt] [|very |so ]{glad}.",
        ),
        facts=(
            ("What was in the {bag}?", "{A:item1}, {a:item2}, and {a:item3} were in the {bag}."),
            ("What did {h} find?", "{h} found the {item3}."),
            ("What colour was the {bag}?", "The {bag} was {colour}."),
            ("Who played with {h}?", "{f} played with {h}."),
            ("Where did they play they were going?", "They played that they were going {trip}."),
        ),
        about=("a trip {trip}", "{a:colour} {bag}"),
    ),
    "sick": Plot(
        cast="any",
        friend="any",
        weather=ANY_WEATHER,
        slots={
            "food": FOODS,
            "gift": ("flower", "drawing", "song", "puppet", "poem", "paper star"),
            "ill": ("a cold", "a sore throat", "a bad cough", "a fever"),
            "plan": ("the fair", "the party", "the parade"),
            "glad": GLAD,
            "colour": COLOURS,
        },
        beats=(
            "{when}{h} wanted to go to {plan} with {f}. But {f} had {ill} and had to stay in bed.",
            (
                '"[Go without me|You can go alone]," said {f} in a small voice. {h} [looked at the '
                "door|thought of {plan}]. [The music had begun|Everyone else was going]."
            ),
            (
                "[But it was no fun without {f}|But {h} did not want to leave {f} alone]. {h} [turned "
                "around|made up {his} mind]."
            ),
            (
                "{He} [went to the kitchen|put on an apron] and made some {food}. Then {he} made {f} "
                "{a:gift}."
            ),
            (
                '{f} [sat up|smiled for the first time that day]. "[For me|Is that for me]?" {fhe} asked. '
                "{f} ate the {food} and looked much better."
            ),
            (
                "?[From the window|Through the window] they could see {plan} after all, with its {colour} "
                "[flags|lights|tents]. [They watched it together|They waved to everyone]."
            ),
            (
                '"[You are the best medicine|You are a good friend]," said {f}[| kindly| gently| with a '
                "smile]. And {h} [was|felt] [|very |so ]{glad}."
            ),
        ),
        facts=(
            ("What did {h} cook?", "{h} made some {food}."),
            ("Why did {f} stay in bed?", "{f} had {ill}."),
            ("Where did {h} want to go?", "{h} wanted to go to {plan}."),
            ("What did {h} make for {f}?", "{h} made some {food} and {a:gift}."),
        ),
        about=("a sick friend", "{plan}"),
    ),
    "map": Plot(
        cast="any",
        friend="peer",
        weather=DRY,
        slots={
            "first,then": (
                ("the crooked tree", "the flat stone"), ("the red gate", "the dry well"),
                ("the old windmill", "the tall rock"), ("the stone bridge", "the white fence"),
                ("the duck pond", "the big oak"), ("the broken wall", "the rose bush"),
                ("the wooden post", "the hollow log"),
            ),
            "steps": NUMBERS[2:],
            "thing": SMALL_THINGS,
            "colour": COLOURS,
            "found": (
                "in an old shoe", "inside a book", "in a bottle", "under a loose board",
                "in a coat pocket",
            ),
            "glad": GLAD,
        },
        beats=(
            "{when}{h} found a map {found}.[| It was old and torn.] {He} showed it to {fintro}.",
            (
                '"[Go to|Walk to] {first}, then to {then}, then take {steps} steps and dig," [it '
                "said|said the map]."
            ),
            (
                '?"[A treasure|It is a treasure map]!" [cried|whispered|said] {h}. "[Come with me|Let us '
                'find it], {f}!"'
            ),
            (
                "[They set off at once|They took a spade and set off|{h} and {f} ran all the way]. They "
                "[came to|found] {first}. Then they [came to|found] {then}. [One, two, three...|They "
                "counted out loud.|Slowly they counted.] They took {steps} steps and began to dig."
            ),
            (
                '?[The ground was hard|There was nothing but sand|A worm looked at them]. "[Let us give '
                'up|I am tired|There is nothing here]," said {f}. "[Just a little more|One more try]," '
                "said {h}[| at last| quietly]."
            ),
            (
                "[Clunk!|Bump!|At last!] There was a box. [Inside|In it] lay {a:colour} {thing} and a "
                'note. "[For the one who does not give up|Well done, treasure hunter]," it said.'
            ),
            (
                "{h} and {f} [laughed|danced|shook hands]. [They took turns keeping|They shared] the "
                "{colour} {thing}, and {h} [was|felt] {glad}."
            ),
        ),
        facts=(
            ("Where did {h} find the map?", "{h} found the map {found}."),
            ("Where did they go first?", "First, they went to {first}."),
            ("How many steps did they take?", "They took {steps} steps."),
            ("What was in the box?", "{A:colour} {thing} was in the box."),
            ("Where did they go after {first}?", "After that, they went to {then}."),
        ),
        about=("a treasure map",),
    ),
    "password": Plot(
        cast="any",
        friend="elder",
        weather=ANY_WEATHER,
        slots={
            "colour*3": COLOURS,
            "door": ("gate", "door", "bridge", "tower"),
            "guard": ("a giant", "a stone lion", "a tall guard", "a talking crow", "an old knight"),
            "prize": (
                "the king's garden", "a room full of books", "a sweet spring", "a hall of music",
                "a field of stars",
            ),
            "glad": GLAD,
        },
        beats=(
            (
                '{when}{f} told {h} a secret: "[Say|Remember] {colour1}, {colour2}, {colour3}, and the '
                'old {door} will open."'
            ),
            (
                '{h} [ran|walked|hurried] to the old {door}. {^guard} stood in front of it. "[What are '
                'the secret words?|Say the secret words!]" it said[.| in a deep voice.]'
            ),
            (
                '?{h} [trembled|swallowed|was so surprised that {he} forgot them]. "[Wrong|No|Speak up]!" '
                "said {the:guard}. {h} closed {his} eyes and thought of {f}."
            ),
            '"{^colour1}, {colour2}, {colour3}!" [said|called|shouted] {h}.',
            (
                "[Slowly|With a creak,|Without a sound,] the {door} opened. [Behind it|On the other side] "
                "was {prize}. [{h} had never seen anything like it.|It was more beautiful than a dream.|]"
            ),
            (
                "?{h} [stayed until the evening|looked at everything|stayed for an hour]. Then {he} ran "
                "home to tell {f}."
            ),
            "{h} [was|felt] {glad}[.|, and {he} never told the words to anyone.]",
        ),
        facts=(
            ("What were the secret words?", "The secret words were {colour1}, {colour2}, {colour3}."),
            ("Who stood in front of the {door}?", "{^guard} stood in front of the {door}."),
            ("Who told {h} the secret?", "{f} told {h} the secret."),
            ("What was behind the {door}?", "Behind the {door} was {prize}."),
        ),
        about=("a secret", "secret words"),
    ),
    "swap": Plot(
        cast="any",
        friend="any",
        weather=ANY_WEATHER,
        slots={
            "thing*3": SMALL_THINGS,
            "who1": ("a sailor", "a farmer", "a clown", "a painter"),
            "who2": ("a princess", "a cook", "an old woman", "a shepherd"),
            "glad": GLAD,
        },
        beats=(
            (
                "{when}{h} wanted to give {f} [a present|something special]. But all {he} had was "
                "{a:thing1}."
            ),
            "?{h} [put it in {his} pocket and|took it and] went out[.| into the world.]",
            (
                'On the [way|road] {he} met {who1}. "[What a fine {thing1}|Just the {thing1} that I '
                'need]!" said {the:who1}. "[I will give you|Take] {a:thing2} for it." So they '
                "[swapped|traded]."
            ),
            (
                '[Then|Further on|After that,] {h} met {who2}. "[That {thing2} is just right for me|Oh, '
                'what a nice {thing2}]!" said {the:who2}. "[I will give you|Take] {a:thing3} for it." [So '
                "they swapped again.|They shook hands on it.]"
            ),
            "?[{h} looked at the {thing3} and smiled|It was the best {thing3} {he} had ever seen].",
            (
                '{h} [ran|went] to {f} and gave {fhim} the {thing3}. "[I always wanted one|It is just '
                'what I wished for]!" said {f}.'
            ),
            (
                "{h} [was|felt] [|very ]{glad}. [And it all began with {a:thing1}!|What a long way for "
                "one small {thing1}!|]"
            ),
        ),
        facts=(
            ("What did {h} have at first?", "At first, {h} had {a:thing1}."),
            ("What did {h} give {f}?", "{h} gave {f} {a:thing3}."),
            ("Who took the {thing1}?", "{The:who1} took the {thing1}."),
            ("What did {h} get for the {thing1}?", "{h} got {a:thing2} for it."),
            ("What did {the:who2} give {h}?", "{The:who2} gave {h} {a:thing3}."),
        ),
        about=("a swap", "{a:thing1} and {a:thing3}"),
    ),
    "sleep": Plot(
        cast="any",
        friend="kin",
        weather=ANY_WEATHER,
        slots={
            "why": (
                "the moon was too bright", "the wind was too loud", "it was too hot",
                "{his} head was full of thoughts", "tomorrow was {his} birthday",
            ),
            "count": ("sheep", "stars", "sleepy owls", "white clouds", "little boats", "falling leaves"),
            "until": NUMBERS[5:],
            "colour": COLOURS,
            "thing": ("blanket", "pillow", "nightcap", "teddy bear", "quilt"),
            "drink": ("warm milk", "mint tea", "honey water"),
        },
        beats=(
            "[One night|That night|Late one evening], {h} could not sleep, because {why}.",
            (
                "{He} [turned to the left, and {he} turned to the right|looked at the wall|got up and lay "
                "down again]. [It did not help.|Nothing helped.|{He} was still awake.]"
            ),
            (
                '?[Then {he} got up|So {he} tiptoed to the door] and called for {f}. "I cannot sleep," '
                "{he} said."
            ),
            (
                '{f} [came in|sat down on the bed] with a cup of {drink} and {a:colour} {thing}. "[Close '
                'your eyes|Lie down], and count {count} with me," said {f}[| kindly| gently| with a '
                "smile]."
            ),
            (
                '"One, two, three," [counted|whispered|began] {h}. [They counted slowly|{f} counted too, '
                "very softly|The room grew quiet]."
            ),
            "[By the time they came to|At] {until}, {h} was [fast asleep|asleep|dreaming of {count}].",
            (
                "?{f} [smiled and put out the light|left the door open a little|gave {him} a kiss]. Good "
                "night, {h}!"
            ),
        ),
        facts=(
            ("Why could {h} not sleep?", "{h} could not sleep because {why}."),
            ("What did they count?", "They counted {count}."),
            ("What was in the cup?", "There was {drink} in the cup."),
            ("How far did they count?", "They counted to {until}."),
            ("What colour was the {thing}?", "The {thing} was {colour}."),
        ),
        about=("someone who cannot sleep",),
    ),
    "shop": Plot(
        cast="child",
        friend="kin",
        weather=ANY_WEATHER,
        slots={
            "buy*3": (
                "milk", "bread", "butter", "soap", "cheese", "flour", "honey", "rice", "salt", "tea",
                "jam", "string",
            ),
            "stop": (
                "a parade", "a puppet show", "two fighting roosters", "a man with a monkey",
                "a big red machine",
            ),
            "trick": (
                "made a song of it", "said it again and again", "counted it on three fingers",
                "drew it on {his} hand",
            ),
            "treat": ("a plum", "a warm bun", "a sugar mouse", "a ginger cookie"),
            "glad": GLAD,
        },
        beats=(
            (
                '{when}{f} sent {h} to the shop. "[We need|Please buy] {buy1}, {buy2}, and {buy3}," said '
                '{f}[| kindly| gently| with a smile]. "[Can you remember that?|Do not forget anything.]"'
            ),
            "{h} [nodded|said yes] and {trick}: {buy1}, {buy2}, {buy3}.",
            (
                "?On the way {he} saw {stop}. [It was so exciting that {he} forgot everything else|{He} "
                "stopped and watched for a while]. [Then {he} ran on|At last {he} went on]."
            ),
            (
                '"[Good day|Hello], {h}. What would you like?" asked the [shopkeeper|woman in the '
                "shop|old man in the shop]."
            ),
            (
                "[For a moment {h} could not remember.|{h} thought hard.|{h} took a deep breath.] [Then "
                'it came back|Then {he} smiled]. "{^buy1}, {buy2}, and {buy3}, please!"'
            ),
            "?{h} carried it all home[.| in a basket.| without dropping a thing.]",
            (
                '"[Nothing is missing|You remembered it all|Just right]!" said {f} and gave {him} '
                "{treat}. {h} [was|felt] {glad}."
            ),
        ),
        facts=(
            ("What did {h} buy?", "{h} bought {buy1}, {buy2}, and {buy3}."),
            ("Who sent {h} to the shop?", "{f} sent {h} to the shop."),
            ("How did {h} remember it?", "{h} {trick}."),
            ("What did {f} give {h}?", "{f} gave {h} {treat}."),
        ),
        about=("a trip to the shop",),
    ),
}  # fmt: skip

# The opening, told before the plot: with no time in it, and with one ("{stamp}" is "One windy morning").
INTROS = (
    "[Once upon a time|Once|Long ago], there [was|lived] {a:trait} {kind} named {h}.",
    "[Once upon a time,|Once] {a:trait} {kind} named {h} lived {home}.",
    "{^home} [lived|there lived] {a:trait} {kind} named {h}.",
    "{h} was {a:trait} {kind} who lived {home}.",
    "{h} was {a:trait} {kind}[.| who loved {like}.]",
    "There was once {a:kind} named {h} who loved {like}.",
    "This is [the|a] story of {h}, {a:trait} {kind} who lived {home}.",
    "Everyone {home} knew {h}, the {trait} {kind}.",
    "Have you heard of {h}? {h} was {a:trait} {kind}[.| who lived {home}.]",
    "{A:kind} named {h} lived {home}.",
)  # fmt: skip
STAMPED_INTROS = (
    "{stamp}, {a:trait} {kind} named {h} [woke up early|looked out at the world|could not sit still].",
    (
        "It was {a:skyword} {daypart}. {h}, {a:trait} {kind}, [was awake early|looked outside|was full of "
        "ideas]."
    ),
    "{stamp}, {h} [jumped up|woke up] with a smile. {h} was {a:trait} {kind} who lived {home}.",
    "{stamp}, something happened to {a:kind} named {h}.",
)  # fmt: skip
LIKE_LINES = (
    "{He} loved {like}.", "{He} liked {like}.", "More than anything, {he} loved {like}.",
    "{He} loved {like} and {like2}.",
)  # fmt: skip
CLOSERS = (
    "The end.",
    "And that is the end of the story.",
    "That night, {h} [slept well|slept with a smile|dreamed of it all].",
    "{h} never forgot that day.",
    "What a day it was!",
)  # fmt: skip

REQUESTS = (
    "[Tell me|Please tell me|Write] a story about {a:kind} named {h}.[| It should be about {about}.]",
    "Can you tell me a story about {a:kind} named {h}?[| It should be about {about}.]",
    "[Tell me|Write|I would like] a [short |]story about {about}.",
    "[A story about|A short story about] {h} the {species}, please.",
    "[Tell me|Write] a [short |]story with {h} and {f} in it.",
    "[Can I have|May I have|Do you know] a story about {about}?",
)  # fmt: skip
SOLO_REQUESTS = tuple(request for request in REQUESTS if "{f}" not in request)
ASKS = (
    "{story}\n\n{question}", "{story}\n{question}",
    "[Here is a story|Read this story]: {story}\n\n{question}", "{question}\n\n{story}",
)  # fmt: skip
SYSTEMS = (
    "You tell short stories.", "You are a friendly storyteller.", "You answer questions about stories.",
    "You are a helpful assistant.",
)  # fmt: skip
SMALL_TALK = (
    ("[Hello|Hi|Good morning|Hello there]!", "Hello! Would you like to hear a story?"),
    (
        "[Who are you|What are you]?",
        "I am a small storyteller. I can tell you a story or answer a question about one.",
    ),
    (
        "[What can you do|How can you help me]?",
        "I can tell you a short story, or answer a question about one.",
    ),
    ("[Thank you|Thanks][.|!]", "You are welcome!"),
    ("[Goodbye|Bye|Good night][.|!]", "Goodbye! Come back soon for another story."),
    ("[How are you|How are you today]?", "I am well, thank you. Would you like to hear a story?"),
)  # fmt: skip
# Introduces the other character where the plot does not.
PEER_INTROS = (
    "{His} best friend was {f}.", "{h} had a friend named {f}.", "{h} often played with {fintro2}.",
)  # fmt: skip
ELDER_INTROS = (
    "{h} [often visited|loved|liked to help] {fplain}.", "{h} [knew|was good friends with] {fplain}.",
)  # fmt: skip
WHENS = (
    "One day,", "One {skyword} {daypart},", "One {daypart},", "Then one day,", "One {skyword} day,",
    "On {a:skyword} {daypart},", "It was {a:skyword} {daypart} when",
)  # fmt: skip
LATER_WHENS = ("", "", "That day,", "That {daypart},")
# Questions that any story can answer; the last three only where the opening tells it.
ABOUT_HERO = (
    ("Who is the story about?", "The story is about {h}, {a:kind}."),
    ("What was the {species}'s name?", "The {species}'s name was {h}."),
)  # fmt: skip
ABOUT_HOME = ("Where did {h} live?", "{h} lived {home}.")
ABOUT_LIKE = ("What did {h} love?", "{h} loved {like}.")
ABOUT_SKY = ("What kind of {daypart} was it?", "It was {a:skyword} {daypart}.")

# Simple questions with answers: sentence, question and answer for each of several people with a thing.
OWN = "{p} has {a:colour} {thing}."
OWN_FACTS = (
    ("Who has the {thing}?", "{p} has the {thing}."),
    ("What does {p} have?", "{p} has {a:colour} {thing}."),
    ("What colour is the {thing}?", "The {thing} is {colour}."),
)  # fmt: skip
PUT = "[{p} put the {thing} {spot}.|{p} left the {thing} {spot}.]"
MOVE = "Then {p} put the {thing} {spot}."
PUT_FACTS = (("Where is the {thing}?", "The {thing} is {spot}."),)
ADD = "{p} has {n} {things}. {q} gives {p} {m} more."
ADD_FACT = ("How many {things} does {p} have now?", "{p} has {total} {things} now.")
REPEATS = ("[Repeat|Say|Copy] these words: {words}.", "[Please repeat|Please say]: {words}.")
