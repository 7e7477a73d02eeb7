package allocation

import "testing"

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
}
