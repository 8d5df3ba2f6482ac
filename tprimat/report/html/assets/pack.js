// Parts of the page are gzip in base64. They are unpacked when something needs them, and at once: printing waits for no promise.
const unpack = id => {
  const packed = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  return new TextDecoder().decode(gunzipSync(bytes));
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
