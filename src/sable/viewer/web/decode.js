// The page's data: JSON, compressed, in base64; inside it, arrays of numbers in base64 of their own.

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const KINDS = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, f4: Float32Array };

async function read(text) {
  const packed = new Blob([bytes(text.trim())]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(packed).text());
}

/** `[kind, base64]` as numbers; null stays null. */
function numbers(packed) {
  return packed ? new KINDS[packed[0]](bytes(packed[1]).buffer) : null;
}

/** Every frame's shapes, as indices in the order they are drawn, from the changes between frames. */
function unfold(scene) {
  const now = new Set();
  return scene.changes.map(([gone, came]) => {
    for (const shape of gone) now.delete(shape);
    for (const shape of came) now.add(shape);
    return [...now].sort((a, b) => scene.shapes[a][1] - scene.shapes[b][1] || a - b);
  });
}
