// Making elements. Text enters the page as text nodes only.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function find(id) {
  return document.getElementById(id);
}

export function count(value) {
  return Number(value || 0).toLocaleString("en-US");
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}
