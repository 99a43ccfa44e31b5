"use strict";
// The data of the page. A block is gzip in base64 and is decoded when it is needed, once.

/** Return what reads the blocks that stand in a document. A newer document has its own. */
function blocksOf(doc) {
  const texts = new Map();
  const decoded = new Map();
  for (const element of doc.querySelectorAll("script[type='text/plain']")) {
    texts.set(Number(element.id.slice("block-".length)), element.textContent);
  }
  const once = (number, decode) => {
    if (!decoded.has(number)) decoded.set(number, bytesOf(texts.get(number)).then(decode));
    return decoded.get(number);
  };
  return {
    /** Return the value of a block of JSON. */
    json: (number) => once(number, (bytes) => JSON.parse(new TextDecoder().decode(bytes))),
    /** Return the numbers of a block, float32 [n]; NaN where there is none. */
    numbers: (number) => once(number, joinedPlanes),
  };
}

async function bytesOf(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function joinedPlanes(bytes) {
  // The last bytes of all numbers come first, then those before them.
  const planes = new Uint8Array(bytes);
  const length = planes.length / 4;
  const joined = new Uint8Array(planes.length);
  for (let plane = 0; plane < 4; plane++) {
    for (let i = 0; i < length; i++) joined[4 * i + plane] = planes[plane * length + i];
  }
  return new Float32Array(joined.buffer);
}
