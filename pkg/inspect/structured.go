package inspect

import (
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
