/** The engine's configuration of a trial: every value that it uses, and where that came from. */

import { get } from "../../api";
import { useLoaded } from "../../live";
import { Cell, Copy, Problem, save, Select, Table } from "../../parts";
import type { EngineAnswer, EngineEntry } from "../../resources";
import { useChoice } from "../../route";

const SHOWN: [string, string, (origin: string) => boolean][] = [
  ["", "All values", () => true],
  ["set", "Changed from default", (origin) => !origin.startsWith("default")],
];

const formatted = (value: unknown): string => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));

/** The values as a tree: an engine file again. */
function tree(entries: EngineEntry[]): Record<string, unknown> {
  const found: Record<string, unknown> = {};
  for (const { key, value } of entries) {
    if (value === null) continue;
    const parts = key.split(".");
    let node = found;
    for (const part of parts.slice(0, -1)) node = (node[part] ??= {}) as Record<string, unknown>;
    node[parts.at(-1)!] = value;
  }
  return found;
}

export function Engine({ trial }: { trial: number }) {
  const path = `/trials/${trial}/engine`;
  const found = useLoaded(path, () => get<EngineAnswer>(path));
  const [wanted, setWanted] = useChoice("values");
  if (found.value === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  const { file, entries, changes, problems } = found.value;
  if (problems.length > 0) return <Problem text={["The engine configuration is not available:", ...problems].join("\n")} kind="warned" />;
  const keep = SHOWN.find(([name]) => name === wanted)?.[2] ?? (() => true);
  const json = `${JSON.stringify(tree(entries), null, 2)}\n`;
  return (
    <section>
      <div class="choice">
        <span>{file ? <code>{file}</code> : "from the experiment file"}</span>
        <Select name="values" value={wanted} options={SHOWN.map(([name, words]) => [name, words])} choose={setWanted} />
        <Copy text={json} />
        <button type="button" onClick={() => save(`engine-${trial}.json`, json)}>
          download
        </button>
      </div>
      {changes.length > 0 && <Problem text={["Values that are interpreted differently:", ...changes].join("\n")} kind="warned" />}
      <Table head={["key", "value", "source"].map((name) => <th key={name}>{name}</th>)}>
        {entries
          .filter(({ origin }) => keep(origin))
          .map(({ key, value, origin }) => (
            <tr key={key}>
              <Cell kind="name">
                <code>{key}</code>
              </Cell>
              <Cell name="value">{formatted(value)}</Cell>
              <Cell name="source">
                <span class="muted">{origin}</span>
              </Cell>
            </tr>
          ))}
      </Table>
    </section>
  );
}
