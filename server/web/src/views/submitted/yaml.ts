/** A tree of JSON values as YAML 1.1 and 1.2 both read it. */

const PLAIN = /^[A-Za-z_][\w./@-]*(?: [\w./@+-]+)*$/;
const WORDS = /^(?:y|n|yes|no|on|off|true|false|null|nan|inf)$/i;

function scalar(value: unknown): string {
  if (typeof value === "string") return PLAIN.test(value) && !WORDS.test(value) ? value : JSON.stringify(value);
  // Python's YAML reads 1e-3 as text: its numbers need a point.
  if (typeof value === "number") return String(value).replace(/^(-?\d+)e/, "$1.0e").replace(/e(\d)/, "e+$1");
  return JSON.stringify(value);
}

const simple = (value: unknown): boolean => value === null || typeof value !== "object";

export function yaml(value: unknown, indent = ""): string {
  if (simple(value)) return `${indent}${scalar(value)}\n`;
  const rows: [string, unknown][] = Array.isArray(value)
    ? value.map((each): [string, unknown] => ["-", each])
    : Object.entries(value as object).map(([key, each]): [string, unknown] => [`${scalar(key)}:`, each]);
  if (rows.length === 0) return `${indent}${Array.isArray(value) ? "[]" : "{}"}\n`;
  return rows
    .map(([head, each]) => {
      if (simple(each) || Object.keys(each as object).length === 0) return `${indent}${head} ${yaml(each)}`;
      if (Array.isArray(each) && each.every(simple)) return `${indent}${head} [${each.map(scalar).join(", ")}]\n`;
      if (head === "-") return `${indent}- ${yaml(each, `${indent}  `).trimStart()}`;
      return `${indent}${head}\n${yaml(each, `${indent}  `)}`;
    })
    .join("");
}
