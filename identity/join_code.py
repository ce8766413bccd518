"""The six-word code of a machine that asks to join without a token: a person compares it on both sides. Pure.

The code is made of the keys of the fleet's authority and of the machine. A server in between has to show the machine an
authority of its own, and the fleet a key of its own, so that the codes differ. Six words are 60 bits. The machine makes a
new key for each attempt and sends it after it has seen the authority, so that a server in between has committed to one
side before it knows the other, and cannot search for a collision.
"""

import hashlib
import re
from typing import Final

WORD_COUNT: Final = 6
_BITS_PER_WORD = 10
_PURPOSE = b"mlx-fleet join code 1\0"


def join_code(authority_hash: bytes, key_hash: bytes) -> str:
    """Return six words for the SHA-256 hashes of two public keys: the authority's and the machine's."""
    digest = hashlib.sha256(_PURPOSE + authority_hash + key_hash).digest()
    number = int.from_bytes(digest) >> (len(digest) * 8 - WORD_COUNT * _BITS_PER_WORD)
    shifts = range((WORD_COUNT - 1) * _BITS_PER_WORD, -1, -_BITS_PER_WORD)
    return " ".join(WORDS[number >> shift & (1 << _BITS_PER_WORD) - 1] for shift in shifts)


def normalize_code(text: str) -> str:
    """Return a code as `join_code` writes it; a person may type other separators, or capital letters."""
    return " ".join(re.split(r"[\s,;._-]+", text.strip().lower()))


# Common English words, chosen for this list. The first four letters of each are its own.
_TEXT = """
acorn actor adapt admire adult advice aerial afford after agent agree ahead alarm album alert alias alive alley
almond alone alpha amber amount anchor angle animal ankle answer antler apple apron arcade arctic arena argue
armor aroma arrow artist ascend ashes aspect athlete atlas atom attic auburn august author autumn avenue avoid
awake award axle bacon badge bagel baker balcony ballad bamboo banana bandit banjo barber basket batch battery
beach beast beauty beaver bedroom beetle begin belief bench beret berry bicycle billion binder birch bishop
bison blanket blazer blend blossom blue bobcat boiler bonus border bottle boulder bounce bowl bracket branch
brave bread brick bridge bronze brother brush bubble bucket budget buffalo builder bullet bumper bundle burger
bushel butter buyer cabin cable cactus camera campus canal candle canoe canyon capital carbon cargo carpet
carrot castle casual catalog cattle caution cedar ceiling center chair chalk change chapter charity cheese
cherry chess chicken child chimney choice chorus cinema circle citizen civil claim clarity classic clay clever
client climb clinic clock cloud clover cluster coast cobalt coconut coffee collar color column comet comfort
common concert condor connect cookie copper coral corner cotton couch country cousin coyote cradle craft crane
crayon credit crew cricket crisp crowd crystal culture curtain cushion custom cycle dagger daily dairy daisy
dancer danger daring data dawn deal debate decade decide define degree delta dentist depth desert design detail
device dialog diamond diary diesel digital dinner diploma direct divide doctor dolphin domain donkey donor
double dough dragon drama drawer dream dress drift driver drum dune dust dynamo eager eagle early earth easel
east easy echo eclipse editor effort elastic elbow elder elegant element elevator ember emerald emotion empire
empty enamel energy engine enjoy enough entry envelope episode equal eraser errand escape essay estate eternal
ethics evening evolve exact example excite exhibit expand explain express extra fabric factor faculty falcon
family famous fancy farmer fashion father fatigue favor feature fence ferry festival fiber fiction field figure
filter final finger fire fiscal flag flame flavor fleet flight float flood fluid flute focus folder follow
forest fork formal fossil foster fountain fragile frame freedom fresh friend frost fruit fudge fuel funnel
future gadget galaxy gallery garage garden garlic gather gauge gazelle general genius gentle geology gesture
ghost giant ginger giraffe glacier glance glass glider globe glory glove glue goat golden goose gospel gossip
gown grain grape gravity green grid grocery group guard guest guide guitar gulf gust habit hammer hamster
handle harbor harmony harvest hazel head health heart heavy helmet herald hero hickory hidden highway hill
hobby hockey holiday hollow honey hood horizon horse hotel hover humble humor hundred hurdle husband hybrid
icon igloo impact inch income index indoor infant inhale insect inside invite iron island item ivory jacket
jaguar jasmine jazz jelly jewel jigsaw join journal judge juice jumbo jungle junior jury kayak kennel kettle
keyboard kidney kingdom kitchen kite kiwi knee koala label ladder lagoon lamp landmark language lantern laptop
large lasso laugh laundry lava lawyer layer leader leaf lecture legend lemon lens leopard letter level liberty
library lichen light lilac limit linen lion liquid lizard loan lobster local lodge logic lotus lounge loyal
lucky lumber lunar lunch luxury lyric machine magnet maiden mammal mango manual maple marble margin market
mason matrix maximum meadow measure medal melody member mentor menu mercury message metal method middle
midnight milk million mimic mineral minute mirror misty mixture mobile model moment monkey month moose morning
mosaic mother motor mountain mouse movie muffin mule muscle museum music mustard mutual myself mystery napkin
narrow nation nature navy nebula nectar needle neighbor nephew neutral never news nickel nimble noble noodle
normal north notebook novel nuclear number nurse nutmeg nylon oasis ocean odyssey office olive omega onion
online opera opinion optic orange orbit orchard order organ orient origin osprey ostrich outdoor oval oven
owner oxygen oyster pacific paddle palace panda panel panther paper parade parcel parrot pasta patient pattern
pause pavement peach peanut pebble pelican pencil people pepper perfect permit person phone photo phrase piano
picnic pigeon pillow pilot pine pioneer pirate pizza planet plate plum pocket poem point polar pond pony
popular portal possible potato powder prairie predict prefer present prince problem product profit promise
proof protect proud public pudding pulse puma pumpkin pupil purple puzzle pyramid quality quantum quarter queen
quest quick quiet quilt quiz rabbit raccoon radar radio raft rail rainbow raisin rally ranch random rapid
rattle raven razor ready reason recipe record reef reflect region relax remote render repair rescue result
return reunion reward rhythm ribbon rice rider ridge ring ripple river robin rocket romance roof rooster rose
rotate round royal rubber rudder runner rural rust saddle safari sailor salad salmon salute sandal satin
sausage scale scarf scene school science scout screen script season second secret seed senior sentence series
sesame settle seven shadow shell shield shine ship shop shrimp shuttle sibling sierra signal silver simple
singer siren sister sketch skill skirt sleeve slice slogan small smart smile smooth snack snow soap soccer
social socket soda soft solar soldier solid song sonic sound south space spare special sphere spider spin
spirit sponge spoon sport spring square squid stable stadium staff stage stamp station steam stem step stick
stock stone story stove street strong student style subject sugar summer sunset super supply surface swan sweet
swift switch sword symbol syrup system table tackle tailor talent tango target taste taxi teacher team temple
tennis tent terrace text theater thread thumb thunder ticket tiger timber time tiny tissue title toast today
token tomato tonic topic torch tornado tortoise total tower town track trade train travel treat tree trend
trial tribe trophy truck trumpet trust tuba tulip tunnel turbine turkey turtle tutor twelve twin type umbrella
uncle under unicorn uniform union unique unit upper urban utility vacuum valid valley vanilla vapor vector
velvet vendor venture vessel veteran victory video view village vintage violin virtual visit vivid vocal voice
volcano volume voyage waffle wagon wallet walnut walrus warm water wave wealth wedding weekend welcome west
wheat wheel whisper white widget width wild willow window winter wisdom wizard wolf wonder wood world writer
yacht yard year yellow yoga young zebra zenith zero zigzag zinc zone
"""
WORDS: Final = tuple(_TEXT.split())
