/** Which checkpoints are versions of models, and how one becomes the next version. */

import { useState } from "preact/hooks";

import { get, post } from "../../api";
import { Question } from "../../dialog";
import { useLoaded } from "../../live";
import type { Model, ModelPage, ModelVersion } from "../../resources";
import { useVisitor } from "../users/access";

export interface Version extends ModelVersion {
  /** Name of the model that it is a version of. */
  model: string;
}

export interface Registered {
  models: Model[];
  versionsOf: (checkpoint: string) => Version[];
  versionsOfTrial: (trial: number) => Version[];
  reload: () => void;
}

export const readModels = (): Promise<Model[]> => get<ModelPage>("/models").then((page) => page.models);

/** The registry as it was when the view was opened, and whenever it is changed there. */
export function useRegistry(): Registered {
  const visitor = useVisitor();
  const { value, reload } = useLoaded(`models ${visitor}`, () => (visitor ? Promise.resolve([]) : readModels()));
  const models = value ?? [];
  const all = models.flatMap(({ name, versions }) => versions.map((version): Version => ({ ...version, model: name })));
  return {
    models,
    versionsOf: (checkpoint) => all.filter((version) => version.checkpoint === checkpoint),
    versionsOfTrial: (trial) => all.filter((version) => version.trial_id === trial),
    reload,
  };
}

interface RegisterProps {
  checkpoint: string;
  registry: Registered;
}

/** A button that makes a checkpoint a version of a model, of a new one too. */
export function Register({ checkpoint, registry }: RegisterProps) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        register
      </button>
      {open && <Form checkpoint={checkpoint} registry={registry} close={() => setOpen(false)} />}
    </>
  );
}

function Form({ checkpoint, registry, close }: RegisterProps & { close: () => void }) {
  const [name, setName] = useState(registry.models[0]?.name ?? "");
  const [notes, setNotes] = useState("");
  const known = registry.models.some((model) => model.name === name);
  const act = async () => {
    if (!known) await post("/models", { name }).then(registry.reload);
    await post(`/models/${name}/versions`, { checkpoint, notes });
    registry.reload();
  };
  return (
    <Question title="register a checkpoint" deed={known || name === "" ? "register" : "create model and register"} act={act} close={close}>
      <p>
        Registers checkpoint <code>{checkpoint}</code> as the next version of a model. A registered checkpoint is kept until its
        version is removed.
      </p>
      <label class="field">
        Model (existing or new)
        <input required list="models" value={name} onInput={(e) => setName(e.currentTarget.value.trim())} />
      </label>
      <datalist id="models">
        {registry.models.map((model) => (
          <option key={model.name} value={model.name} />
        ))}
      </datalist>
      <label class="field">
        Notes
        <input value={notes} onInput={(e) => setNotes(e.currentTarget.value)} />
      </label>
    </Question>
  );
}
