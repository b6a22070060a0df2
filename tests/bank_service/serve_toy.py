"""``serve_toy.py FILE PORT [DELAY]``: a bank's server over toy parts, until it is killed. DELAY seconds: of a distillation."""

import asyncio
import sys

from service_toys import serving


async def main(path, port, delay):
    async with serving(path, port=int(port), delay=lambda prompt: float(delay)) as (url, _, _):
        print("ready", url.rpartition(":")[2], flush=True)
        await asyncio.sleep(300)


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else 0))
