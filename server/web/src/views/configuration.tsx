/** The whole configuration of an experiment, to be read and to be taken along. */

import { Copy, save } from "../parts";
import type { Experiment } from "../resources";
import { useChoice } from "../route";
import { yaml } from "../yaml";

export function Configuration({ row }: { row: Experiment }) {
  const [form, setForm] = useChoice("form", "yaml");
  const text = form === "json" ? `${JSON.stringify(row.config, null, 2)}\n` : yaml(row.config);
  return (
    <section>
      <div class="choice">
        {["yaml", "json"].map((name) => (
          <button type="button" aria-pressed={form === name} key={name} onClick={() => setForm(name)}>
            {name.toUpperCase()}
          </button>
        ))}
        <Copy text={text} />
        <button type="button" onClick={() => save(`experiment-${row.id}.${form}`, text)}>
          download
        </button>
        <a href={`/api/v1/experiments/${row.id}/archive`}>model directory (tar.gz)</a>
      </div>
      <pre class="config" tabIndex={0} aria-label="configuration">
        {text}
      </pre>
    </section>
  );
}
