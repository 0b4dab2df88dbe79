"""Tables of common knowledge for the tasks of `ruler_lite`: what a fact implies, and words by category."""

from __future__ import annotations

PEOPLE = (
    "Alma", "Bruno", "Cora", "Dexter", "Edith", "Felix", "Gilda", "Hugo", "Ines", "Jonas", "Karin", "Leo",
    "Mabel", "Nestor", "Otto", "Piers", "Quinn", "Rosa", "Silas", "Tessa", "Ulric", "Vera", "Wanda", "Yara",
)  # fmt: skip

ASSOCIATIONS = (
    ("rents a room beside the Eiffel Tower", "lives in France"),
    ("parks a scooter at the Colosseum every morning", "lives in Italy"),
    ("paints the Acropolis from a balcony", "lives in Greece"),
    ("sells tickets for the Taj Mahal", "lives in India"),
    ("leads camels around the Sphinx", "lives in Egypt"),
    ("cooks soup for hikers at Machu Picchu", "lives in Peru"),
    ("has a kiosk at the Brandenburg Gate", "lives in Germany"),
    ("sees Mount Fuji from the kitchen", "lives in Japan"),
    ("sweeps the stairs of the Sydney Opera House", "lives in Australia"),
    ("wakes up when Big Ben strikes", "lives in England"),
    ("crosses Red Square after lunch", "lives in Russia"),
    ("has a hotel behind the beach of Copacabana", "lives in Brazil"),
    ("sneezes as soon as a kitten comes close", "is allergic to cats"),
    ("gets spots after eating bread", "has to avoid wheat"),
    ("drinks neither milk nor cream", "should not touch cheese"),
    ("mends dripping pipes", "is a plumber"),
    ("drills holes into teeth and fills them", "is a dentist"),
    ("slides down a pole when the alarm sounds", "fights fires"),
    ("lands a jet in thick fog", "is a pilot"),
    ("shears forty sheep a day", "has wool for sale"),
    ("looks at the rings of Saturn on clear nights", "owns a telescope"),
    ("trades a bishop for a rook", "plays chess"),
    ("tucks four strings under the chin", "is a violinist"),
    ("serves aces and hates double faults", "needs a tennis racket"),
    ("breathes from a tank among corals", "is a scuba diver"),
    ("pulls rabbits out of an empty hat", "is a magician"),
    ("adds yeast to dough before sunrise", "is a baker"),
    ("wears a white veil and says yes at the altar", "is a bride"),
    ("blew out the candles on a cake", "has had a birthday"),
    ("rocks a newborn to sleep", "has become a parent"),
)
"""What is said of a person, and what follows from that alone and is asked, in other words."""

CATEGORIES = (
    ("sparrow", "falcon", "pigeon", "heron", "parrot", "owl"),
    ("trout", "salmon", "herring", "carp", "tuna", "cod"),
    ("beetle", "wasp", "moth", "ant", "grasshopper", "mosquito"),
    ("oak", "birch", "maple", "pine", "willow", "beech"),
    ("rose", "tulip", "daisy", "lily", "dandelion", "orchid"),
    ("apple", "banana", "cherry", "grape", "mango", "peach"),
    ("carrot", "onion", "cabbage", "spinach", "turnip", "lettuce"),
    ("coffee", "tea", "lemonade", "cider", "cocoa", "beer"),
    ("hammer", "saw", "chisel", "wrench", "screwdriver", "pliers"),
    ("chair", "sofa", "wardrobe", "stool", "bench", "bookcase"),
    ("jacket", "sweater", "trousers", "scarf", "skirt", "glove"),
    ("violin", "trumpet", "flute", "piano", "cello", "drum"),
    ("truck", "tram", "bicycle", "van", "scooter", "tractor"),
    ("canoe", "ferry", "yacht", "kayak", "barge", "raft"),
    ("iron", "copper", "silver", "zinc", "nickel", "tin"),
    ("ruby", "emerald", "sapphire", "topaz", "opal", "diamond"),
    ("purple", "turquoise", "crimson", "beige", "scarlet", "magenta"),
    ("rain", "snow", "hail", "fog", "drizzle", "thunder"),
    ("elbow", "knee", "ankle", "shoulder", "wrist", "chin"),
    ("uncle", "niece", "cousin", "grandmother", "nephew", "sister"),
    ("baker", "plumber", "lawyer", "nurse", "tailor", "carpenter"),
    ("tennis", "hockey", "rowing", "boxing", "fencing", "golf"),
    ("castle", "barn", "chapel", "tower", "cottage", "factory"),
    ("anger", "joy", "fear", "envy", "sorrow", "pride"),
)
"""Words that belong together; no word belongs to two of them."""
