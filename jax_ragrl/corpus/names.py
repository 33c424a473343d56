"""Name banks of the generated encyclopedia; fixed, so that one tokenizer covers every seed."""

# Each name combines two words from small banks. Entities therefore share words, and a search for a
# name also returns passages about similarly named entities.
FIRST_NAME = tuple(
    """Adela Bruno Carla Dario Elina Farid Greta Henri Irena Jonas Karin Lucio Mirna Nadir
    Odile Pavel Quinn Rosa Stefan Tamar Ulric Vera Willem Xenia Yusuf Zelda Anton Bianca
    Cyril Delia Emil Flora""".split()
)
LAST_NAME = tuple(
    """Abbate Brandt Castell Dorrit Ekholm Farrow Gantz Holloway Ibarra Jansen Kessler
    Lindqvist Moreau Novak Okafor Petrov Quiroga Rossi Santoro Tanaka Urbina Varga Weller
    Xanthis Yilmaz Zamora Almeida Bellini Corvin Duarte Eriksen Fontaine""".split()
)
TOWN = tuple(
    """Alderburg Brixley Corvale Dunmore Eastwick Fenholm Glenrock Harrowby Istria Juniper
    Kilbride Larkspur Marlow Northam Oakhurst Pinewood Quarry Redcliff Stonehaven Thornby
    Upton Valmere Westbrook Yarrow Zellwood Ashford Birchdale Coldwater Driftwood
    Elmsworth Foxglove Greyfell""".split()
)
PREFIX = tuple("Port New Upper Old Lower Saint".split())
# A country is an answer but never a subject, so that countries need not share words.
COUNTRY = tuple(
    """Arvania Belmora Castovia Drelland Estoria Fennmark Gallovia Hestria Ithania Jorvik""".split()
)
ADJECTIVE = tuple(
    """Silent Crimson Hidden Golden Broken Distant Frozen Burning Hollow Velvet Midnight
    Wandering Forgotten Electric Paper Savage Gentle Restless Scarlet Winter""".split()
)
NOUN = tuple(
    """Harbor Garden Mirror Orchard River Empire Letter Voyage Lantern Canyon Promise Horizon
    Castle Shadow Anthem Island Carnival Compass Kingdom Thunder""".split()
)
TRADE = tuple("Foods Motors Textiles Airlines Robotics Shipping Pharma Studios".split())
BRAND = tuple(
    """Apex Borealis Cobalt Delphi Everest Falcon Granite Helix Indigo Jupiter Keystone Lumen
    Meridian Nimbus Onyx Pioneer Quantum Raven Summit Titan""".split()
)
