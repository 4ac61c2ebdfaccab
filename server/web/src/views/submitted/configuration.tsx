/** The configuration of an experiment, to be read and to be taken along. */

import { get } from "../../api";
import { useLoaded } from "../../live";
import { Copy, Problem, save } from "../../parts";
import type { Experiment, SubmittedAnswer } from "../../resources";
import { trialAddress, useChoice } from "../../route";
import { yaml } from "./yaml";

const FORMS = { yaml: "YAML", json: "JSON", submitted: "as submitted" };

export function Configuration({ row, trial }: { row: Experiment; trial: number | null }) {
  const [form, setForm] = useChoice("form", "yaml");
  const path = `/experiments/${row.id}/submitted`;
  const asked = form === "submitted";
  const submitted = useLoaded(`${path} ${asked}`, () => (asked ? get<SubmittedAnswer>(path).then(({ config }) => yaml(config)) : Promise.resolve("")));
  const text = asked ? (submitted.value ?? "") : form === "json" ? `${JSON.stringify(row.config, null, 2)}\n` : yaml(row.config);
  return (
    <section>
      <div class="choice">
        {Object.entries(FORMS).map(([name, label]) => (
          <button type="button" aria-pressed={form === name} key={name} onClick={() => setForm(name)}>
            {label}
          </button>
        ))}
        <Copy text={text} />
        <button type="button" onClick={() => save(`experiment-${row.id}.${form === "json" ? "json" : "yaml"}`, text)}>
          download
        </button>
        <a href={`/api/v1/experiments/${row.id}/archive`}>model directory (tar.gz)</a>
        {trial !== null && <a href={trialAddress(trial, "engine")}>engine of trial {trial}</a>}
      </div>
      {asked && submitted.error && <Problem text={submitted.error} />}
      <pre class="config" tabIndex={0} aria-label="configuration">
        {text}
      </pre>
    </section>
  );
}
