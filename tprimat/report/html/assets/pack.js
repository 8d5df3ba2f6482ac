// Parts of the page are gzip in base64. They are unpacked when something needs them, and at once: printing waits for no promise.
const LENGTHS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCES = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577];
const DISTANCE_BITS = DISTANCES.map((_, code) => Math.max(0, (code >> 1) - 1));
const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

// Lengths of a Huffman code -> symbol * 16 + length, by the next bits of the stream.
function codeOf(lengths) {
  const most = Math.max(1, ...lengths);
  const table = new Uint16Array(1 << most);
  for (let length = 1, code = 0; length <= most; length++, code <<= 1) {
    for (let symbol = 0; symbol < lengths.length; symbol++) {
      if (lengths[symbol] !== length) continue;
      let place = 0;
      for (let bit = 0; bit < length; bit++) place |= (code >> bit & 1) << length - 1 - bit;
      for (; place < table.length; place += 1 << length) table[place] = symbol << 4 | length;
      code++;
    }
  }
  return { table, most };
}

// One gzip member without a name, as Python's gzip.compress writes it: RFC 1951 behind ten bytes, and the size at the end.
function inflate(bytes) {
  const out = new Uint8Array(new DataView(bytes.buffer).getUint32(bytes.length - 4, true));
  let [place, written, held, count] = [10, 0, 0, 0];
  const fill = most => { for (; count < most; count += 8) held |= bytes[place++] << count; };
  const bits = most => { fill(most); return drop(most, held & (1 << most) - 1); };
  const drop = (used, value) => { held >>>= used; count -= used; return value; };
  const next = ({ table, most }) => { fill(most); const entry = table[held & (1 << most) - 1]; return drop(entry & 15, entry >> 4); };
  const dynamic = () => {
    const [literals, distances, codes] = [bits(5) + 257, bits(5) + 1, bits(4) + 4];
    const lengths = new Array(19).fill(0);
    for (const symbol of CODE_ORDER.slice(0, codes)) lengths[symbol] = bits(3);
    const [code, all] = [codeOf(lengths), []];
    while (all.length < literals + distances) {
      const symbol = next(code);
      if (symbol < 16) all.push(symbol);
      else {
        const [value, times] = symbol === 16 ? [all.at(-1), 3 + bits(2)] : [0, symbol === 17 ? 3 + bits(3) : 11 + bits(7)];
        for (let i = 0; i < times; i++) all.push(value);
      }
    }
    return [codeOf(all.slice(0, literals)), codeOf(all.slice(literals))];
  };
  const fixed = () => [codeOf(Array.from({ length: 288 }, (_, i) => i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8)), codeOf(new Array(30).fill(5))];
  for (let last = 0; !last;) {
    last = bits(1);
    const kind = bits(2);
    if (kind === 0) {
      place -= count >> 3;
      held = count = 0;
      const size = bytes[place] | bytes[place + 1] << 8;
      out.set(bytes.subarray(place + 4, place + 4 + size), written);
      written += size;
      place += 4 + size;
      continue;
    }
    const [literals, distances] = kind === 1 ? fixed() : dynamic();
    for (let symbol; (symbol = next(literals)) !== 256;) {
      if (symbol < 256) { out[written++] = symbol; continue; }
      const size = LENGTHS[symbol - 257] + bits(LENGTH_BITS[symbol - 257]);
      const code = next(distances);
      const back = DISTANCES[code] + bits(DISTANCE_BITS[code]);
      for (const end = written + size; written < end; written++) out[written] = out[written - back];
    }
  }
  return out;
}

const unpack = id => {
  const packed = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  return new TextDecoder().decode(inflate(bytes));
};
const once = make => { let made; return () => made ??= make(); };
const pageData = once(() => JSON.parse(unpack("data")));
const loadPlotly = once(() => {
  const script = document.createElement("script");
  script.textContent = unpack("plotly");
  document.head.append(script);
  return window.Plotly;
});
const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
