/** A new experiment from one that there is: its model directory, and its file as the reader changes it. */

import { useState } from "preact/hooks";

import { get, post } from "../../api";
import { Question } from "../../dialog";
import { useLoaded } from "../../live";
import { Problem } from "../../parts";
import type { Experiment, ExperimentAnswer, SubmittedAnswer } from "../../resources";
import { address } from "../../route";
import { yaml } from "./yaml";

export function Fork({ row }: { row: Experiment }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        fork
      </button>
      {open && <Editor row={row} close={() => setOpen(false)} />}
    </>
  );
}

function Editor({ row, close }: { row: Experiment; close: () => void }) {
  const path = `/experiments/${row.id}`;
  const given = useLoaded(path, () => get<SubmittedAnswer>(`${path}/submitted`).then(({ config }) => yaml(config)));
  const [written, setText] = useState<string | null>(null);
  const [paused, setPaused] = useState(false);
  const text = written ?? given.value ?? "";
  const act = async () => {
    const { experiment } = await post<ExperimentAnswer>(`${path}/fork`, { yaml: text, activate: !paused });
    window.location.hash = address(experiment.id).slice(1);
  };
  return (
    <Question title={`fork experiment ${row.id}`} deed="submit" act={act} close={close}>
      <p>
        The new experiment uses the model directory of experiment {row.id} and this file. Experiment {row.id} does not change.
      </p>
      {given.error && <Problem text={given.error} />}
      <textarea
        class="wide"
        aria-label="experiment file"
        rows={22}
        spellcheck={false}
        disabled={given.value === null}
        value={text}
        onInput={(e) => setText(e.currentTarget.value)}
      />
      <label>
        <input type="checkbox" checked={paused} onChange={(e) => setPaused(e.currentTarget.checked)} /> Submit as paused
      </label>
    </Question>
  );
}
