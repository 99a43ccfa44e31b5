"use strict";
// The data of the page. A block is gzip in base64 and is decoded when it is needed, once.

const blocks = new Map();
const decodedBlocks = new Map();

/** Take the blocks that stand in a document, in place of older ones. */
function takeBlocks(doc) {
  blocks.clear();
  decodedBlocks.clear();
  for (const element of doc.querySelectorAll("script[type='text/plain']")) {
    blocks.set(Number(element.id.slice("block-".length)), element.textContent);
  }
}

async function bytesOfBlock(number) {
  const packed = Uint8Array.from(atob(blocks.get(number)), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function once(number, decode) {
  if (!decodedBlocks.has(number)) decodedBlocks.set(number, bytesOfBlock(number).then(decode));
  return decodedBlocks.get(number);
}

/** Return the value of a block of JSON. */
function jsonBlock(number) {
  return once(number, (bytes) => JSON.parse(new TextDecoder().decode(bytes)));
}

/** Return the numbers of a block, float32 [n]; NaN where there is none. */
function numberBlock(number) {
  return once(number, (bytes) => {
    // The last bytes of all numbers come first, then those before them.
    const planes = new Uint8Array(bytes);
    const length = planes.length / 4;
    const joined = new Uint8Array(planes.length);
    for (let plane = 0; plane < 4; plane++) {
      for (let i = 0; i < length; i++) joined[4 * i + plane] = planes[plane * length + i];
    }
    return new Float32Array(joined.buffer);
  });
}
