package inspect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"sigs.k8s.io/yaml"
)

// WriteJSON writes the report as one indented JSON document.
func WriteJSON(out io.Writer, report Report) error {
	data, err := json.MarshalIndent(report, "", "    ")
	if err != nil {
		return fmt.Errorf("writing the report as JSON: %w", err)
	}
	_, err = out.Write(append(data, '\n'))
	return err
}

// WriteYAML writes the report as one YAML document of the same structure, its separator first: so documents can follow
// one another.
func WriteYAML(out io.Writer, report Report) error {
	data, err := yaml.Marshal(report)
	if err != nil {
		return fmt.Errorf("writing the report as YAML: %w", err)
	}
	_, err = out.Write(append([]byte("---\n"), data...))
	return err
}

// WriteNames writes the names of the nodes, or of the pending pods, as other commands take them: kubectl describe, say.
func WriteNames(out io.Writer, report Report, pending bool) error {
	var text bytes.Buffer
	if pending {
		for _, pod := range report.PendingPods {
			fmt.Fprintf(&text, "pod/%s\n", pod.Name)
		}
	} else {
		for _, node := range report.Nodes {
			fmt.Fprintf(&text, "node/%s\n", node.Name)
		}
	}
	_, err := text.WriteTo(out)
	return err
}
