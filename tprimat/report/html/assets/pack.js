// Parts of the page are gzip in base64; they are unpacked when something needs them.
const unpack = async id => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};
const once = make => { let made; return () => made ??= make(); };
const pageData = once(async () => JSON.parse(await unpack("data")));
const loadPlotly = once(async () => {
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);
  return window.Plotly;
});
const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
