package allocation

import (
	"fmt"
	"testing"
)

func TestDeviceSet(t *testing.T) {
	a := NewDeviceSet([]string{"01", "02", "1"})
	if b := NewDeviceSet([]string{"1", "02", "01"}); a != b {
		t.Error("the order of IDs makes a difference")
	}
	for _, other := range [][]string{{"0", "102", "1"}, {"01", "02"}, {"01", "02", "1", "2"}, {"01", "01", "1"}, nil} {
		if b := NewDeviceSet(other); a == b {
			t.Errorf("%q makes no difference", other)
		}
	}
	// Every pair of similar IDs: sums that cancel out would show here.
	seen := map[DeviceSet]string{}
	for first := range 200 {
		for second := range first {
			ids := []string{fmt.Sprintf("0%x", first), fmt.Sprintf("1%x", second)}
			set := NewDeviceSet(ids)
			if other := seen[set]; other != "" {
				t.Fatalf("%s and %q have the same value", other, ids)
			}
			seen[set] = fmt.Sprint(ids)
		}
	}
}
